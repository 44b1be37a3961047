"""AdamW in its storage forms, clipping, learning-rate schedule, optimizer state."""
