"""AdamW in three storage formats, gradient clipping, the learning-rate schedule and optimizer state."""
