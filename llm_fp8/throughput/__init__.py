"""Training with random weights on random tokens, to be timed: what scripts/benchmark.py and scripts/benchmark_multi_gpu.py share.

workload.py    the shape of a step, its batches, and how the weights move
weights.py     the same random weights for every arm
ours.py        this project's training of a workload, built as a run builds it
rival.py       the usual set-ups: transformers with Accelerate, compiled, in Accelerate's own fp8, with torchao
arms.py        names of arms -> what they train
measure.py     one arm, built, timed and recorded; figures from its step times
worker.py      one measurement in a process of its own (one GPU)
results.py     the results file of a launch in several processes, which outlives them
"""
