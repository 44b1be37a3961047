"""Training steps with random weights, to be timed: what scripts/benchmark.py, scripts/benchmark_multi_gpu.py and
benchmarks/speed_table.py share.

workload.py        the shape of a step, its batches and random weights
variants.py        what is trained how, in words: ours and the baselines
variant_names.py   names of variants -> variants
ours.py            this project's training of a workload, built as a run builds it
baselines.py       the usual set-ups: transformers with Accelerate, compiled, in Accelerate's own fp8, with torchao
measure.py         one variant, built, timed and recorded
worker.py          one measurement in processes of its own; the options and results file of the programs that measure
alone.py           the program of a measurement on one GPU
launch.py          the program of a measurement on several
"""
