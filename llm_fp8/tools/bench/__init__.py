"""Training steps with random weights, to be timed: what scripts/benchmark.py, scripts/benchmark_multi_gpu.py and
benchmarks/speed_table.py share.

workload.py        the shape of a step, its batches and random weights
variants.py        what is trained how, by name: ours and the baselines
ours.py            this project's training of a workload, built as a run builds it
baselines.py       the usual set-ups: transformers with Accelerate, compiled, in Accelerate's own fp8, with torchao
measure.py         one variant, built, timed and recorded; the program of a measurement on one GPU
worker.py          one measurement in processes of its own; the options of the programs that measure
launch.py          the program of a measurement on several GPUs, and its results file
"""
