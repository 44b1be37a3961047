"""One run: its parts, the loop, checkpoints, evaluation, and the records it leaves."""
