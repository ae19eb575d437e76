"""Volumes for tests: a pool of PersistentVolumes in plain folders, bound through the StorageClass `tandem-local`.

The class is the default. A claim binds to a volume at once, for one pod or for many. A released volume is emptied and
offered again by the next `up` or `load`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

STORAGE_CLASS = "tandem-local"
POOL_SIZE = 24
CAPACITY = "20Gi"
WORLD_WRITABLE = 0o777
"""hostPath ignores fsGroup, and pods run under ids of their own."""

Kubectl = Callable[..., str]


def volume_names() -> list[str]:
    return [f"tandem-local-{number:02}" for number in range(POOL_SIZE)]


def build_storage_class() -> dict[str, Any]:
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {
            "name": STORAGE_CLASS,
            "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
        },
        "provisioner": "kubernetes.io/no-provisioner",
        "volumeBindingMode": "Immediate",
        "reclaimPolicy": "Retain",
    }


def build_volume(name: str, folder: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": CAPACITY},
            "accessModes": ["ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": STORAGE_CLASS,
            "hostPath": {"path": f"{folder}/{name}", "type": "Directory"},
        },
    }


def plan_pool(existing: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """(volumes to delete, volumes to create): released ones are deleted first and then made anew."""
    phases = {item["metadata"]["name"]: item.get("status", {}).get("phase") for item in existing}
    released = [name for name in volume_names() if phases.get(name) in {"Released", "Failed"}]
    absent = [name for name in volume_names() if name not in phases]
    return released, sorted(released + absent)


def replenish(kubectl: Kubectl, folder: Path, folder_on_node: str) -> None:
    """Bring the pool to full size. `folder` is where this machine sees what the node sees at `folder_on_node`."""
    existing = json.loads(kubectl("get", "persistentvolumes", "-o", "json"))["items"]
    released, wanted = plan_pool(existing)
    if released:
        kubectl("delete", "persistentvolume", "--wait=true", *released)
    for name in wanted:
        place = folder / name
        if place.exists():
            shutil.rmtree(place)
        place.mkdir(parents=True)
        place.chmod(WORLD_WRITABLE)
    items = [build_storage_class(), *(build_volume(name, folder_on_node) for name in wanted)]
    kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
