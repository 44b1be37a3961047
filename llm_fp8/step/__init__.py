"""One optimizer step: micro-batches, losses, CUDA graphs, recomputation, fused weight gradients."""
