"""Where a step's precision, time and memory go: `llm-fp8 diagnose` and scripts/diagnose_fp8.py."""
