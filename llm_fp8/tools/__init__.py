"""Programs around a training run, one file or folder each."""
