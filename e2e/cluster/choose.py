"""Which backend this machine gets."""

from __future__ import annotations

from .base import ClusterBackend
from .errors import ClusterError
from .images.builder import docker_answers
from .settings import ClusterSettings

NAMES = ("kind", "binaries", "existing")


def choose_name(asked: str | None, *, docker: bool, kubeconfig: bool = False) -> str:
    """The asked-for backend, else the cluster of KUBECONFIG, else kind where a Docker engine answers, else binaries.

    Raises ClusterError for a typo.
    """
    if asked is None:
        return "existing" if kubeconfig else "kind" if docker else "binaries"
    if asked not in NAMES:
        raise ClusterError(f"TANDEM_CLUSTER is `{asked}`; it can be {', '.join(NAMES)}")
    return asked


def choose_backend(settings: ClusterSettings) -> ClusterBackend:
    """A cluster that is up keeps its backend; the environment decides about a new one."""
    theirs = settings.kubeconfig is not None and not settings.is_own(settings.kubeconfig)
    asks = settings.backend is None and not theirs
    name = choose_name(settings.backend, docker=asks and docker_answers(), kubeconfig=theirs)
    if name == "kind":
        from .kind import KindBackend

        return KindBackend(settings)
    if name == "existing":
        from .existing import ExistingBackend

        return ExistingBackend(settings)
    from .binaries.backend import BinariesBackend

    return BinariesBackend(settings)
