"""Checks of an installation that execute what a run would execute: what scripts/verify_fp8.py runs.

result.py       what a check answers: status, sentence, commands that mend it
setup.py        what the checks are told: the user's shape, the environment as it was, what is here
registry.py     the checks, in order
runner.py       runs them; a check that crashes or does not end is a failed check
output.py       the table, the JSON file, and what is under way
command.py      the command line and the exit code
processes.py    other processes: started, waited for within a limit, ended with the script, their last words kept
*_probe.py      what runs in such a process: what could end it in native code, or must start as a run starts

Every other file is one check. It gathers evidence in one function and judges it in another, pure one, so that each
verdict can be tested without the hardware that would give it. Heavy imports stand inside the functions: a package that
does not load must be an answer, not the end.
"""
