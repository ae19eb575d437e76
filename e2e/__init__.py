"""Everything that runs against a real Kubernetes: the cluster itself, the model mirror, the demo, the suite."""
