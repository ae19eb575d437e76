"""A GPU's first half hour: what is checked and measured on it, in stages that each fit into one command."""
