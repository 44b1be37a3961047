"""The comparison of training runs that differ in precision alone (scripts/compare_performance.py).

cli.py          the runs of a comparison, one after the other, and what is said of them
run_record.py   the variants by name; one finished run as plain values, from its folder or W&B's server
statistics.py   intervals over runs, exact test over problems: numbers in, numbers out
figures.py      run records -> the figures of each variant, and in what the runs differ besides
verdict.py      figures -> a judgement in words
report.py       all of it as one value that JSON can hold; as a table and as an HTML page with charts (assets/)
"""
