"""Model families: one file of structure each, and the registry of published architectures."""
