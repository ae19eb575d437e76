"""A digest that names a model's weights, so that workers with different ones never exchange key-value blocks."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

MANIFEST = ".tandem-manifest.json"
"""Beside a completed download: `{file: sha256 or git blob id}` as the hub announced and as was verified."""
_SAMPLES = 64
_SAMPLE_BYTES = 64 * 1024
_WEIGHTS = (".safetensors", ".gguf")


def model_digest(path: Path) -> str:
    """Of a downloaded model: over the verified digests of its files. Of any other: over names, sizes and samples.

    Two workers that read the same files get the same digest wherever those lie. Samples are spread over each weight
    file; they tell models apart, but are no proof against somebody who forges one.
    """
    manifest = path / MANIFEST
    if path.is_dir() and manifest.is_file():
        lines = [f"{name} {digest}" for name, digest in sorted(json.loads(manifest.read_text())["files"].items())]
    else:
        lines = [f"{file.name} {_fingerprint(file)}" for file in _weight_files(path)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def _weight_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(
        (file for file in path.iterdir() if file.suffix in _WEIGHTS or file.name == "config.json"),
        key=lambda file: file.name,
    )


def _fingerprint(file: Path) -> str:
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as source:
        for index in range(_SAMPLES):
            offset = max(0, (size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
            source.seek(offset)
            digest.update(source.read(_SAMPLE_BYTES))
            if size <= _SAMPLE_BYTES:
                break
    return digest.hexdigest()
