"""A cache of every child in the cluster, by model.

Objects are kept as compressed JSON: a thousand models have some fifteen thousand children, and as Python objects those
would need ten times the memory for something that is read a few at a time. Of pods, of which one model may have
thousands, only what the operator reads is kept, and of others no status that nobody reads: a change of anything else is
no news. Reading a model lets the event loop go on in between.
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from tandem_api import names

from tandem_operator.kube.ownership import updates
from tandem_operator.objects.manifests import (
    DEPLOYMENT,
    JOB,
    POD,
    STATEFUL_SET,
    ChildKey,
    Kind,
    Manifest,
    ModelKey,
    annotations_of,
    controller_of,
    dig,
    labels_of,
)
from tandem_operator.objects.pods import ENDED_BY_NODE, is_ready
from tandem_operator.runtime.turns import LoopTurns

_AT_ONCE = 25
_POD_METADATA = (
    "name", "namespace", "uid", "labels", "ownerReferences", "creationTimestamp", "deletionTimestamp",
    "deletionGracePeriodSeconds",
)  # fmt: skip
_LEFT_OUT = ("managedFields", "resourceVersion")
"""Fields of every kind: what is not read, and would make news of every change."""
_WITH_STATUS = (STATEFUL_SET, DEPLOYMENT, JOB, POD)
_POD_SPEC = ("readinessGates", "nodeName")
_POD_STATUS = (
    "phase",
    "reason",
    "message",
    "conditions",
    "initContainerStatuses",
    "containerStatuses",
    "podIP",
    "endedBefore",
)


@dataclass(frozen=True, slots=True)
class Kept:
    """An object that a store has taken."""

    model: ModelKey
    """The one that it is about."""
    is_news: bool
    """It says something that was not known, of what is kept."""
    left: ModelKey | None = None
    """The one that it was about before: its label was changed."""


class ChildStore:
    """Children by model. Not thread-safe: it belongs to one event loop."""

    def __init__(self, loop_turns: LoopTurns | None = None) -> None:
        self._loop_turns = loop_turns or LoopTurns()
        self._models: defaultdict[ModelKey, dict[ChildKey, bytes]] = defaultdict(dict)
        self._owners: dict[tuple[str, ChildKey], ModelKey] = {}
        """Models by namespace and child: labels change."""
        self._ends: defaultdict[ModelKey, dict[str, Manifest]] = defaultdict(dict)
        """How pods of StatefulSets ended that their nodes ended, by name, until one of that name is ready, or wanted no
        longer."""

    def children(self, model: ModelKey) -> dict[ChildKey, Manifest]:
        """Copies of all children of a model."""
        packed = self._models.get(model, {})
        return {key: json.loads(zlib.decompress(data)) for key, data in packed.items()}

    async def read(self, model: ModelKey) -> dict[ChildKey, Manifest]:
        """The same, of this moment, without holding the event loop for long."""
        packed = list(self._models.get(model, {}).items())
        found: dict[ChildKey, Manifest] = {}
        for start in range(0, len(packed), _AT_ONCE):
            await self._loop_turns.next()
            found |= {key: json.loads(zlib.decompress(data)) for key, data in packed[start : start + _AT_ONCE]}
        return found

    def put(self, kind: Kind, manifest: Manifest) -> Kept | None:
        """Keep a child; None for an object without a model."""
        key = ChildKey(kind.name, manifest["metadata"]["name"])
        if (model := model_of(manifest)) is None:
            return None
        before = self._owners.get((model.namespace, key))
        left = before if before != model else None
        if left is not None:
            self._forget(left, key)
        if kind == POD:
            manifest = self._with_end_before(model, manifest)
        elif kind == STATEFUL_SET:
            self._forget_ends(model, manifest, replicas=dig(manifest, "spec", "replicas") or 0)
        packed = _pack(kind, manifest)
        known = self._models[model].get(key)
        self._models[model][key] = packed
        self._owners[model.namespace, key] = model
        return Kept(model, is_news=known != packed, left=left)

    def remove(self, kind: Kind, manifest: Manifest) -> ModelKey | None:
        """Forget a child, whatever its labels say by now. Returns its model."""
        key = ChildKey(kind.name, manifest["metadata"]["name"])
        model = self._owners.get((manifest["metadata"]["namespace"], key)) or model_of(manifest)
        if model is not None:
            self._forget(model, key)
        return model

    def retain(self, kind: Kind, namespace: str | None, present: Iterable[tuple[ModelKey, str]]) -> set[ModelKey]:
        """Forget the children of `kind` that a complete list did not have. Returns the models that lost one."""
        alive = set(present)
        gone = [
            (model, key)
            for model, children in self._models.items()
            if namespace is None or model.namespace == namespace
            for key in children
            if key.kind == kind.name and (model, key.name) not in alive
        ]
        for model, key in gone:
            self._forget(model, key)
        return {model for model, _ in gone}

    def models(self) -> set[ModelKey]:
        return set(self._models)

    def _forget(self, model: ModelKey, key: ChildKey) -> None:
        children = self._models.get(model, {})
        packed = children.pop(key, None)
        self._owners.pop((model.namespace, key), None)
        if packed is not None and key.kind == STATEFUL_SET.name:
            self._forget_ends(model, json.loads(zlib.decompress(packed)), replicas=0)
        if not children:
            self._models.pop(model, None)
            self._ends.pop(model, None)

    def _forget_ends(self, model: ModelKey, owner: Manifest, *, replicas: int) -> None:
        """Drop how pods have ended that this StatefulSet makes no more."""
        uid, ends = owner["metadata"].get("uid"), self._ends.get(model, {})
        for name, ended in list(ends.items()):
            ordinal = name.rpartition("-")[2]
            if ended["owner"] == uid and not (ordinal.isdecimal() and int(ordinal) < replicas):
                del ends[name]

    def _with_end_before(self, model: ModelKey, pod: Manifest) -> Manifest:
        """`pod`, with `status.endedBefore` where the node of the one before it ended that: a StatefulSet deletes such a
        pod at once, and the next one knows nothing of it. One that ends well when it is evicted has no reason."""
        owner = controller_of(pod) or {}
        if owner.get("kind") != STATEFUL_SET.name:
            return pod  # the next one has another name
        name, uid = str(pod["metadata"]["name"]), pod["metadata"].get("uid")
        ended = self._ends.get(model, {}).get(name)
        status: Manifest = pod.get("status") or {}
        if status.get("phase") in ("Failed", "Succeeded") and "deletionTimestamp" not in pod["metadata"]:
            reason = status.get("reason") or ENDED_BY_NODE
            message, by = status.get("message"), owner.get("uid")
            self._ends[model][name] = {"uid": uid, "reason": reason, "message": message, "owner": by}
        elif ended is not None and is_ready(pod):
            del self._ends[model][name]
        elif ended is not None and ended["uid"] != uid:
            return pod | {"status": status | {"endedBefore": ended}}
        return pod


def model_of(manifest: Manifest) -> ModelKey | None:
    """The model whose child this is."""
    name = labels_of(manifest).get(names.LABEL_MODEL)
    return None if name is None else ModelKey(manifest["metadata"]["namespace"], name)


def _pack(kind: Kind, manifest: Manifest) -> bytes:
    metadata = {key: value for key, value in manifest["metadata"].items() if key not in _LEFT_OUT}
    if (own := updates(manifest)) and kind != POD:
        metadata["managedFields"] = [{key: entry[key] for key in ("manager", "operation")} for entry in own]
    # Items of a list carry neither kind nor apiVersion.
    whole = manifest | {"kind": kind.name, "apiVersion": kind.api_version, "metadata": metadata}
    if kind not in _WITH_STATUS:
        whole.pop("status", None)
    if kind == POD:
        annotations = {k: v for k, v in annotations_of(manifest).items() if k.startswith(f"{names.GROUP}/")}
        spec: Manifest = manifest.get("spec") or {}
        status: Manifest = manifest.get("status") or {}
        whole = {
            "kind": kind.name,
            "apiVersion": kind.api_version,
            "metadata": {key: metadata[key] for key in _POD_METADATA if key in metadata}
            | ({"annotations": annotations} if annotations else {}),
            "spec": {key: spec[key] for key in _POD_SPEC if key in spec},
            "status": {key: status[key] for key in _POD_STATUS if key in status},
        }
    return zlib.compress(json.dumps(whole, separators=(",", ":")).encode(), level=1)
