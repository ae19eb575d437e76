"""Layers and attention on the Triton kernels of `tandem_worker.kernels`."""
