"""The honest comparison of training runs that differ in precision alone: what scripts/compare_performance.py is made
of.

arms.py          names of arms -> options; a run -> its arm
launch.py        the command lines of the runs, in order, one after another or on several GPUs
run_record.py    one finished run as plain values, from its folder
wandb_runs.py    the same from W&B: an offline run on disk, or the server
certificates.py  what the certificates of an arm's runs say
statistics.py    bootstrap, spread, paired exact test: numbers in, numbers out
figures.py       run records -> the figures of each arm
differences.py   in what runs differ besides their arm
verdict.py       figures -> a judgement in words
comparison.py    all of it together, as one value that JSON can hold
rows.py          its table as text, and how each figure is computed
text.py          that value on a terminal
page.py          that value as one self-contained HTML page (page.html, page.css, page.js)
"""
