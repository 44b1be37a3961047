"""One optimizer step: micro-batches, the losses, CUDA graphs, recomputation, fused weight gradients."""
