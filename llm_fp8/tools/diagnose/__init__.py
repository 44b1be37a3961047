"""Measure the precision, time and memory of a step's parts: `llm-fp8 diagnose` and scripts/diagnose_fp8.py."""
