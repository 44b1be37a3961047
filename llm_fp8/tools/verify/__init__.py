"""The checks of scripts/verify_fp8.py: is this machine fit to train in fp8?

versions.py             compares installed packages with the pins and imports them
environment_rules.py    finds environment variables that harm, slow or do nothing
gpu.py                  checks GPU and driver and measures the rates of GEMMs
runs.py                 trains for a few steps in each recipe that the GPU has, and on several GPUs
hosts.py                checks the hosts of a launch together: packages, network, output folder, a step
result.py               the input and the result of a check
cli.py                  the table of checks, the command line, the output

Heavy imports wait until a check runs, so that a package that does not load fails a check and does not end the program.
"""
