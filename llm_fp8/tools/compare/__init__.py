"""Compare training runs that differ only in precision: `llm-fp8 compare`, scripts/compare_performance.py."""
