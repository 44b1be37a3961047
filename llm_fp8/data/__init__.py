"""Turn text into batches; `prepare.prepare_data` is the entry point. Labels in a `Batch` are already shifted."""
