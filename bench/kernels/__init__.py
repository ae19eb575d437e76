"""Benchmark of the worker's kernels against the limits of the device they run on."""
