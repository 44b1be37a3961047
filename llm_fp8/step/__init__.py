"""One optimizer step: micro-batches, the losses, graphs, recomputation, fused weight gradients."""
