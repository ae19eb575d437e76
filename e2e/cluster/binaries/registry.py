"""The local registry's storage: who needs which image, and what goes when it has grown.

Clusters of several checkouts may share one cache. Each writes down which images it needs (`<cache>/clusters/<id>`), and
what a living cluster needs is never removed. Whoever pushes holds the lock together with others; whoever removes holds
it alone.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..commands import run
from .processes import Processes

LIMIT = 3 * 2**30
"""Bytes. One generation of all images takes about one GiB, most of it the worker's dependencies."""
_REPOSITORIES = "docker/registry/v2/repositories"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Tag:
    repository: str
    name: str
    used: float
    """When it was last pushed or asked for, in seconds since 1970."""


def plan_removal(tags: Iterable[Tag], needed: set[tuple[str, str]]) -> list[Tag]:
    """Tags to remove: all but those that are needed and the one last used of each repository, oldest first."""
    by_use = sorted(tags, key=lambda tag: tag.used)
    last = {tag.repository: tag for tag in by_use}
    return [tag for tag in by_use if (tag.repository, tag.name) not in needed and tag != last[tag.repository]]


class Leases:
    """Which images the clusters of one cache need, by `repository:tag`."""

    def __init__(self, cache: Path) -> None:
        self.folder = cache / "clusters"
        self._lock = cache / "registry.lock"

    @contextmanager
    def pushing(self) -> Iterator[None]:
        """Nothing is removed meanwhile."""
        with self._locked(fcntl.LOCK_SH):
            yield

    @contextmanager
    def removing(self) -> Iterator[bool]:
        """Whether nobody pushes, now or meanwhile."""
        try:
            with self._locked(fcntl.LOCK_EX | fcntl.LOCK_NB):
                yield True
        except BlockingIOError:
            yield False

    @contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        self._lock.parent.mkdir(parents=True, exist_ok=True)
        with self._lock.open("w") as file:
            fcntl.flock(file, how)
            yield

    def read(self, cluster: str) -> set[str]:
        file = self.folder / cluster
        return set(json.loads(file.read_text())["images"]) if file.exists() else set()

    def write(self, cluster: str, state: Path, images: Iterable[str]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = self.folder / f".{cluster}"
        unfinished.write_text(json.dumps({"state": str(state), "images": sorted(images)}))
        unfinished.rename(self.folder / cluster)

    def end(self, cluster: str) -> None:
        (self.folder / cluster).unlink(missing_ok=True)

    def needed(self) -> set[tuple[str, str]]:
        """By repository and tag, of clusters that live; what those wrote that do not is removed."""
        found: set[str] = set()
        for file in self.folder.glob("[!.]*"):
            written = json.loads(file.read_text())
            if is_running(Path(written["state"])):
                found.update(written["images"])
            else:
                file.unlink()
        return {(name, tag) for name, _, tag in (image.rpartition(":") for image in found)}


def is_running(state: Path) -> bool:
    """Whether any of a cluster's recorded processes lives."""
    processes = Processes(state / "processes.json", state / "logs")
    return len(processes.dead()) < len(processes.read())


def size(storage: Path) -> int:
    return sum(file.stat().st_size for file in storage.rglob("*") if file.is_file())


def observe_tags(storage: Path) -> list[Tag]:
    links = (storage / _REPOSITORIES).glob("*/_manifests/tags/*/current/link")
    return [
        Tag(repository=link.parents[4].name, name=link.parents[1].name, used=link.stat().st_mtime) for link in links
    ]


def mark_used(storage: Path, repository: str, name: str) -> None:
    (storage / _REPOSITORIES / repository / "_manifests/tags" / name / "current/link").touch()


def bound(storage: Path, leases: Leases, program: Path, limit: int = LIMIT) -> str | None:
    """Remove images that no living cluster needs from a registry that has grown. What to tell a person, if anything."""
    with leases.removing() as alone:
        if not alone or size(storage) <= limit:
            return None
        removed = plan_removal(observe_tags(storage), leases.needed())
        for tag in removed:
            shutil.rmtree(storage / _REPOSITORIES / tag.repository / "_manifests/tags" / tag.name)
        configuration = storage.parent / "registry-bound.json"
        configuration.write_text(
            json.dumps(
                {
                    "version": 0.1,
                    "storage": {"filesystem": {"rootdirectory": str(storage)}},
                    "http": {"addr": "127.0.0.1:0"},
                }
            )
        )
        run(program, "garbage-collect", "--delete-untagged", configuration, timeout=300)
        left = size(storage)
    if left > limit:
        return f"the image registry holds {left / 2**30:.1f} GiB that clusters need or used last ({storage})"
    return f"removed {len(removed)} images that no cluster needs from the registry"
