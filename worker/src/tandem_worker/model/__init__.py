"""Model families: one file of structure each; layers are shared."""
