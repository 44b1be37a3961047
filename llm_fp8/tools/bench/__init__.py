"""Training with random weights, to be timed: what scripts/benchmark.py, scripts/benchmark_multi_gpu.py and
benchmarks/speed_table.py share.

workload.py    the shape of a step and its batches
text.py        real documents for a step, packed and padded
weights.py     the same random weights for every arm
ours.py        this project's training of a workload, built as a run builds it
rival.py       the usual set-ups: transformers with Accelerate, compiled, in Accelerate's own fp8, with torchao
setups.py      what is trained how, in words: ours and the rivals
arms.py        names of arms -> setups
measure.py     one arm, built, timed and recorded
figures.py     what step times come to
worker.py      one measurement in processes of its own: one on one GPU, a launch on several
alone.py       what they run on one GPU
table.py       the speed table's rows: workloads, arms, targets
results.py     the results file of a launch in several processes, which outlives them
"""
