"""Triton kernels and cross entropy. This code has no dependency on models, options or data."""
