"""A training run: setup, loop, checkpoints, evaluation, and records."""
