"""Is this machine fit to train in fp8? Heavy imports wait until a check runs: it fails if a package does not load."""
