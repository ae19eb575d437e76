"""A real Kubernetes anywhere, with Tandem's images in it.

`python -m e2e.cluster up|down|status|load|env` on the command line; `connect()` in Python.
"""

from __future__ import annotations

from .connection import Cluster, connect
from .errors import ClusterError

__all__ = ["Cluster", "ClusterError", "connect"]
