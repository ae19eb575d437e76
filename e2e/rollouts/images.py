"""Two names of the worker's image: a change from one to the other is a new build to the operator and nobody else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from e2e.cluster import Cluster
from e2e.suite.fleet import Object

DOCKER_HUB = "docker.io/library/"


def other_name(reference: str, named: Iterable[Sequence[str]]) -> str:
    """Another name of an image that nodes have. `named` has the names of each image of theirs.

    Raises LookupError where they know it by this name alone.
    """
    spelled = {reference, DOCKER_HUB + reference}
    for names in named:
        if spelled & set(names):
            repository = reference.rpartition(":")[0]
            digests = [name for name in names if name.partition("@")[0] in (repository, DOCKER_HUB + repository)]
            others = [*(name for name in digests if "@" in name), *(spelled & set(names) - {reference})]
            if others:
                return others[0]
    raise LookupError(f"nodes know {reference} by no other name")


def both_names(cluster: Cluster) -> tuple[str, str]:
    """Of the worker's image."""
    nodes: list[Object] = json.loads(cluster.kubectl("get", "nodes", "-o", "json"))["items"]
    reference = cluster.images["worker"]
    return reference, other_name(reference, (image["names"] for node in nodes for image in node["status"]["images"]))
