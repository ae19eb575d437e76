"""A cache of every child in the cluster, by model.

Objects are kept as compressed JSON: a thousand models have some fifteen thousand children, and as Python objects those
would need ten times the memory for something that is read a few at a time. Of pods, of which one model may have
thousands, only what the operator reads is kept. Reading a model lets the event loop go on in between.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections import defaultdict
from collections.abc import Iterable

from tandem_api import names

from tandem_operator.manifests import POD, ChildKey, Kind, Manifest, ModelKey, labels_of

_AT_ONCE = 100
_POD_METADATA = (
    "name", "namespace", "uid", "labels", "annotations", "ownerReferences", "creationTimestamp", "deletionTimestamp",
    "deletionGracePeriodSeconds",
)  # fmt: skip
_POD_SPEC = ("readinessGates", "nodeName")
_POD_STATUS = ("phase", "reason", "message", "conditions", "initContainerStatuses", "containerStatuses", "podIP")


class ChildStore:
    """Children by model. Not thread-safe: it belongs to one event loop."""

    def __init__(self) -> None:
        self._models: defaultdict[ModelKey, dict[ChildKey, bytes]] = defaultdict(dict)

    def children(self, model: ModelKey) -> dict[ChildKey, Manifest]:
        """Copies of all children of a model."""
        packed = self._models.get(model, {})
        return {key: json.loads(zlib.decompress(data)) for key, data in packed.items()}

    async def read(self, model: ModelKey) -> dict[ChildKey, Manifest]:
        """The same, of this moment, without holding the event loop for long."""
        packed = list(self._models.get(model, {}).items())
        found: dict[ChildKey, Manifest] = {}
        for start in range(0, len(packed), _AT_ONCE):
            if start:
                await asyncio.sleep(0)
            found |= {key: json.loads(zlib.decompress(data)) for key, data in packed[start : start + _AT_ONCE]}
        return found

    def put(self, kind: Kind, manifest: Manifest) -> ModelKey | None:
        """Keep a child. Returns its model; None for an object without one."""
        if (model := model_of(manifest)) is None:
            return None
        self._models[model][ChildKey(kind.name, manifest["metadata"]["name"])] = _pack(kind, manifest)
        return model

    def remove(self, kind: Kind, manifest: Manifest) -> ModelKey | None:
        """Forget a child. Returns its model."""
        if (model := model_of(manifest)) is None:
            return None
        self._forget(model, ChildKey(kind.name, manifest["metadata"]["name"]))
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
        children.pop(key, None)
        if not children:
            self._models.pop(model, None)


def model_of(manifest: Manifest) -> ModelKey | None:
    """The model whose child this is."""
    name = labels_of(manifest).get(names.LABEL_MODEL)
    return None if name is None else ModelKey(manifest["metadata"]["namespace"], name)


def _pack(kind: Kind, manifest: Manifest) -> bytes:
    metadata = {key: value for key, value in manifest["metadata"].items() if key != "managedFields"}
    # Items of a list carry neither kind nor apiVersion.
    whole = manifest | {"kind": kind.name, "apiVersion": kind.api_version, "metadata": metadata}
    if kind == POD:
        spec: Manifest = manifest.get("spec") or {}
        status: Manifest = manifest.get("status") or {}
        whole = {
            "kind": kind.name,
            "apiVersion": kind.api_version,
            "metadata": {key: metadata[key] for key in _POD_METADATA if key in metadata},
            "spec": {key: spec[key] for key in _POD_SPEC if key in spec},
            "status": {key: status[key] for key in _POD_STATUS if key in status},
        }
    return zlib.compress(json.dumps(whole, separators=(",", ":")).encode(), level=1)
