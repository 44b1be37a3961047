"""Triton kernels and attention code; tensors in, tensors out."""
