"""Kubernetes from plain programs, for Linux machines without a Docker engine."""
