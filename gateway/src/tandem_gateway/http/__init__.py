"""The client's side of the data path: reading requests strictly, writing responses."""
