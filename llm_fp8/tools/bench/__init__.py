"""Training throughput: variants that take turns (`cli`), and set-ups that are not ours (`baselines`)."""
