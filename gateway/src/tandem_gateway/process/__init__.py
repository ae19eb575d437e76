"""The running process: what it is told, its listeners and its end, the metrics port, and what it reports."""
