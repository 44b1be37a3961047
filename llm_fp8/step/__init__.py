"""One optimizer step: micro-batches, losses, graphs, recomputation, fused weight gradients."""
