"""Attention backends over the paged block space; the contract is in `base`."""
