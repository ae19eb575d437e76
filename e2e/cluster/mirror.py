"""Starts the model mirror in the cluster: it stands for the Hugging Face hub, which the cluster cannot reach."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from .progress import step
from .storage import Kubectl

MANIFEST = Path(__file__).resolve().parents[1] / "mirror" / "mirror.yaml"
IMAGE_PLACEHOLDER = "IMAGE"
NAMESPACE = "tandem-mirror"


def build_objects(manifest: str, image: str) -> list[dict]:
    """The manifest's objects with the image filled in."""
    objects = [found for found in yaml.safe_load_all(manifest) if found]
    for found in objects:
        if found["kind"] == "Deployment":
            for container in found["spec"]["template"]["spec"]["containers"]:
                if container["image"] == IMAGE_PLACEHOLDER:
                    container["image"] = image
    return objects


def deploy(kubectl: Kubectl, image: str) -> None:
    """Return once the mirror serves."""
    items = build_objects(MANIFEST.read_text(), image)
    with step("the model mirror serves", quiet_below=0.5):
        kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
        kubectl("-n", NAMESPACE, "rollout", "status", "deployment/mirror", "--timeout=120s")
