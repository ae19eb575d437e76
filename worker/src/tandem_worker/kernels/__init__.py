"""Triton kernels, each with a plain-torch twin in `reference`."""
