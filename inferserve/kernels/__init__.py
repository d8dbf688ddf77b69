"""Triton kernels, each beside its torch twin; imports nothing of the package."""
