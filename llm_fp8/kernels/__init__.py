"""Triton kernels and cross entropy: code that knows tensors only."""
