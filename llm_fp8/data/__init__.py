"""Turn text into batches. The entry point is `prepare.prepare_data`; the labels in a `Batch` are already shifted."""
