"""Programs around a run: verify, diagnose, memory, compare, bench, evaluate, export to fp8, the certificate for other
trainers, the W&B dashboard.
"""
