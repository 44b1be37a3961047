"""Is this machine fit to train in fp8? Checks import heavy packages, so one that does not load fails a check."""
