"""Where a step's precision, time and memory go: `llm-fp8 diagnose` and scripts/diagnose_fp8.py.

step.py       the run's fp8 coverage and certificate, a step's kernels by class, and its memory by kind
quality.py    the cost of fp8 in the forward pass, by kind of module (--quality)
cli.py        the command line and the tables
"""
