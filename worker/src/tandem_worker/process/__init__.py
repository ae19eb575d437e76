"""The life of a worker process: start, warm-up, probes, metrics, drain and end."""
