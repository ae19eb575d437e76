"""Kubernetes objects as data: kinds, keys, pods, errors and problems. Nothing here reads or writes."""
