"""What layers are made of: torch's operations, the CPU kernels, or the Triton kernels; `select` chooses."""
