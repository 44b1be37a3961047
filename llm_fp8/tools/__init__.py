"""Programs to run before, after or beside a training run, one file or folder each."""
