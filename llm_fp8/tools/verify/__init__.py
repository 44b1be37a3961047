"""Is this machine fit to train in fp8? Checks import packages late, so that a broken package fails one check."""
