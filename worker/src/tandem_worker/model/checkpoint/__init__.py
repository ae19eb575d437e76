"""Checkpoint readers: safetensors and GGUF; the contract is in `contract`."""
