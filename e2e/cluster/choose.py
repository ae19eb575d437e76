"""Which backend this machine gets."""

from __future__ import annotations

from .base import Backend
from .errors import ClusterError
from .images.builder import docker_answers
from .settings import Settings

NAMES = ("kind", "binaries", "existing")


def choose_name(asked: str | None, *, docker: bool) -> str:
    """The asked-for backend, else kind where a Docker engine answers, else binaries. Raises ClusterError for a typo."""
    if asked is None:
        return "kind" if docker else "binaries"
    if asked not in NAMES:
        raise ClusterError(f"TANDEM_CLUSTER is `{asked}`; it can be {', '.join(NAMES)}")
    return asked


def choose_backend(settings: Settings) -> Backend:
    """A cluster that is up keeps its backend; the environment decides about a new one."""
    name = choose_name(settings.backend, docker=settings.backend is None and docker_answers())
    if name == "kind":
        from .kind import KindBackend

        return KindBackend(settings)
    if name == "existing":
        from .existing import ExistingBackend

        return ExistingBackend(settings)
    from .binaries.backend import BinariesBackend

    return BinariesBackend(settings)
