"""What a step will take, in time and in memory, before it is run: pure functions of sizes and of constants measured on
one GPU.

workload.py      what is predicted: a model's sizes, a recipe, tokens, sharding
calibration.py   the rates and bandwidths, each with the records that it was fitted to
step_time.py     seconds of an optimizer step, by part
memory.py        peak memory of a GPU, by part
prediction.py    both, for a GPU by name
after_run.py     a run's outcome beside what was predicted for it
"""
