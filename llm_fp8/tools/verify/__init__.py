"""The checks of scripts/verify_fp8.py: is this machine fit to train in fp8?

Heavy imports wait until a check runs, so that a package that does not load fails a check and does not end the program.
"""
