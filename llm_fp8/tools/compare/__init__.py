"""The comparison of training runs that differ in precision alone (scripts/compare_performance.py).

variants.py     names of variants -> options; a run -> its variant
cli.py          the runs of a comparison, one after the other, and what is said of them
run_record.py   one finished run as plain values, from its folder or W&B's server
statistics.py   intervals over runs, exact test over problems: numbers in, numbers out
figures.py      run records -> the figures of each variant
differences.py  in what runs differ besides their variant
verdict.py      figures -> a judgement in words
report.py       all of it as one value that JSON can hold; as a table and as an HTML page with charts (assets/)
"""
