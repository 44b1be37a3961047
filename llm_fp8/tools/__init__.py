"""Programs around a run, one file or folder each."""
