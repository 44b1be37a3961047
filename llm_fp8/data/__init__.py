"""Text to batches; `prepare.prepare_data` is the entry. Labels in a `Batch` are shifted."""
