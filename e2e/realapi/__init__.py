"""A control plane without nodes: a real API server, real controllers, and a stand-in for kubelets and gateways.

It starts in seconds, so it is where the operator is tested against what else writes to a cluster: people, admission
policies, other controllers. Everything listens on the loopback interface.
"""

from e2e.realapi.control_plane import ControlPlane, start
from e2e.realapi.nodes import Nodes

__all__ = ["ControlPlane", "Nodes", "start"]
