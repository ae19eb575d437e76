"""Groups: the pods of one replica, by the arithmetic of their ordinals. Pure.

Replica `g` of `size` pods consists of the ordinals `g * size` up to `g * size + size - 1`; its first pod leads it. A
StatefulSet adds and removes pods at its end, so that a multiple of `size` pods always is a number of whole groups. A
group of one is a pod.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from tandem_api import names

from tandem_operator.objects.manifests import Manifest, dig, labels_of
from tandem_operator.objects.pods import has_started, is_leaving, is_ready, revision_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PodGroup:
    """The present pods of one replica."""

    index: int
    size: int
    """Pods that it should have."""
    pods: tuple[Manifest, ...]

    @property
    def is_complete(self) -> bool:
        return len(self.pods) == self.size

    @property
    def is_ready(self) -> bool:
        """Every pod is there, ready, and stays."""
        return self.is_complete and not any(is_leaving(pod) or not is_ready(pod) for pod in self.pods)

    @property
    def is_broken(self) -> bool:
        """It cannot be serving: a pod is missing, leaving or not up. A pod that was up and is unready for now is."""
        return not self.is_complete or any(is_leaving(pod) or not has_started(pod) for pod in self.pods)

    def is_of(self, revisions: Collection[str]) -> bool:
        """Every pod is there and made from one of these revisions of its StatefulSet's template."""
        return self.is_complete and not self.outdated(revisions)

    def outdated(self, revisions: Collection[str]) -> list[Manifest]:
        """Pods made from another revision that are not on their way out."""
        return [pod for pod in self.pods if revision_of(pod) not in revisions and not is_leaving(pod)]


def group_size(labels: dict[str, str]) -> int:
    """Pods of one replica, by the labels of a pod or of a pod template; 1 where they do not say."""
    text = labels.get(names.LABEL_NODES_PER_REPLICA, "1")
    return int(text) if text.isascii() and text.isdigit() and int(text) > 0 else 1


def group_pods(pods: Iterable[Manifest], size: int) -> list[PodGroup]:
    """The groups of which any pod is there, in order. What has no ordinal is no StatefulSet's pod and left out."""
    by_ordinal = {ordinal: pod for pod in pods if (ordinal := _ordinal(pod)) is not None}
    found: dict[int, list[Manifest]] = {}
    for ordinal, pod in sorted(by_ordinal.items()):
        found.setdefault(ordinal // size, []).append(pod)
    return [PodGroup(index=index, size=size, pods=tuple(members)) for index, members in found.items()]


def _ordinal(pod: Manifest) -> int | None:
    try:
        return names.pod_ordinal(pod["metadata"]["name"])
    except ValueError:
        return None


def describe_pod(pod: Manifest) -> str:
    """`Pod NAME`, and where several pods form a replica, its place there."""
    name, size, ordinal = str(dig(pod, "metadata", "name")), group_size(labels_of(pod)), _ordinal(pod)
    if size == 1 or ordinal is None:
        return f"Pod {name}"
    replica, node = divmod(ordinal, size)
    return f"Pod {name} (node {node} of replica {replica})"
