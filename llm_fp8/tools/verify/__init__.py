"""The checks of scripts/verify_fp8.py: each executes a part of what a training run executes.

setup.py        the input of every check: the user's shape, the environment at the start, the GPUs
result.py       its answer: status, sentence, commands that fix it
runner.py       the table of checks and the loop that runs them; a check that crashes or hangs is a failed check
cli.py          the command line, terminal and JSON output, the exit code
processes.py    runs other processes within a time limit, keeps their output, ends them with the script
*_probe.py      what runs in such a process, because it may crash in native code or must start as a run starts

Every other file is one check. It gathers evidence in one function and judges it in another, pure one, so that each
verdict is tested without the hardware. Heavy imports stand inside the functions, because a package that does not load
must be a failed check and not the end of the script.
"""
