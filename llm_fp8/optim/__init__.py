"""Optimizers, gradient clipping, the learning-rate schedule and optimizer state."""
