"""How pods mount the Secret with their keys (`tandem_operator.keys.secret`)."""

from __future__ import annotations

from collections.abc import Sequence

from tandem_api import names

from tandem_operator.objects.manifests import Manifest
from tandem_operator.workloads.blueprint import Blueprint

KEY_FILES = (names.PEERS_KEY_FILE, names.API_KEY_FILE)
_VOLUME = "keys"
_MODE = 0o440
"""The pod's fsGroup reads them, nobody writes."""


def keys_volume(blueprint: Blueprint, files: Sequence[str]) -> Manifest:
    """Volume with these files. Mounted as a folder, because the kubelet never refreshes single files."""
    items = [{"key": file, "path": file} for file in files]
    secret = {"secretName": names.keys_name(blueprint.name), "defaultMode": _MODE, "items": items}
    return {"name": _VOLUME, "secret": secret}


def keys_mount() -> Manifest:
    return {"name": _VOLUME, "mountPath": names.KEYS_PATH, "readOnly": True}
