"""Programs around a run: verify, diagnose, memory, compare, bench; the Trainer callback, the W&B dashboard,
evaluation of a checkpoint.
"""
