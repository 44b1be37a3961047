"""The comparison of training runs that differ in precision alone: `llm-fp8 compare`, scripts/compare_performance.py."""
