"""Training with random weights on random tokens, to be timed: what scripts/benchmark.py and scripts/benchmark_multi_gpu.py share.

workload.py    the shape of a step, and its batches
ours.py        this project's training of a workload, built as a run builds it
rival.py       the usual set-up: transformers + Accelerate
arms.py        names of arms -> what they train
results.py     the results file of a launch, which outlives its processes
"""
