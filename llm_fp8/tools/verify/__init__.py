"""The checks of scripts/verify_fp8.py: is this machine fit to train in fp8?

versions.py             installed packages against the pins, and whether they load
environment_rules.py    environment variables that harm, slow or do nothing
gpu.py                  GPU and driver, the rates of its GEMMs
runs.py                 short training runs: one per recipe that the GPU has, and one on several GPUs
result.py               what a check gets and answers
cli.py                  the table of checks, the command line, the output

Heavy imports wait until a check runs: a package that does not load must be a failed check, not the program's end.
"""
