"""The contract of a cluster backend, and what they share.

A backend owns one cluster. `up` and `down` are idempotent: they look at what is there and do what is missing. What a
backend cannot do on this machine it says in a ClusterError, before it has changed anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .images.catalog import Image


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    running: bool
    detail: str
    """One line for a person."""


class ClusterBackend(Protocol):
    """`kind`, `binaries` or `existing`."""

    name: str

    @property
    def kubeconfig(self) -> Path:
        """The file that `kubectl --kubeconfig` takes; exists once `up` has returned."""
        ...

    def check(self) -> None:
        """Raise ClusterError when this machine cannot run the backend."""
        ...

    def up(self) -> None:
        """Return once the API server answers and a node is Ready."""
        ...

    def down(self) -> None:
        """Stop what `up` started, and nothing else. Caches stay."""
        ...

    def status(self) -> ClusterStatus: ...

    def load(self, wanted: list[Image]) -> dict[str, str]:
        """Build what is not built, hand it to the cluster's nodes, and return the reference of each part's image."""
        ...

    def add(self, image: Image, root: Path) -> str:
        """Build an image from the tree under `root` and let the nodes have it beside those of `load`, whose next call
        may forget it. Returns its reference."""
        ...

    def service_url(self, namespace: str, service: str, port: int) -> AbstractContextManager[str]:
        """A URL that reaches a Service from this machine for the time of the block.

        Raises ClusterError when nothing answers there: the Service or its pods are missing.
        """
        ...

    def logs(self) -> dict[str, Path]:
        """Files with the control plane's logs, by component; empty where the backend does not have them."""
        ...


@contextmanager
def constant_url(url: str) -> Iterator[str]:
    yield url
