"""Linters of the manifests that people get: the rendered chart and the objects that the operator makes."""
