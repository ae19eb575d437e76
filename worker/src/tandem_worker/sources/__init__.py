"""Where model files come from: hf://, pvc://, file://; the contract is in `base`."""
