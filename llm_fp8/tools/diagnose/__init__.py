"""Precision, time and memory of a step, by part: `llm-fp8 diagnose` and scripts/diagnose_fp8.py."""
