"""The checks of scripts/verify_fp8.py: each executes a part of what a training run executes.

result.py       the input of every check (`Setup`) and its answer (`Result`)
runner.py       the table of checks and the loop that runs them
cli.py          the command line, terminal and JSON output, the exit code
processes.py    runs other processes within a time limit and keeps their output

The other files hold the checks, one subject each. A check gathers evidence in one function and judges it in another,
pure one, so that each verdict is tested without the hardware. Heavy imports wait until a check runs, because a package
that does not load must be a failed check and not the end of the script.
"""
