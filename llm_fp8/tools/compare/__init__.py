"""The comparison of training runs that differ in precision alone (scripts/compare_performance.py).

cli.py          the command line; plans and starts the runs, then compares them
run_record.py   the variants by name; one finished run as plain values, from its folder or W&B's server
statistics.py   intervals over runs: numbers in, numbers out
figures.py      run records -> the figures of each variant, and other differences between the runs
verdict.py      figures -> a verdict in words
report.py       the comparison as one value for JSON, as a table, and as an HTML page with charts (assets/)
"""
