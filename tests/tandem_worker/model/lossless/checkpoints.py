"""Small checkpoints with everything that a packed one must give back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from tandem_worker.model.checkpoint.packed_folder import Form
from tandem_worker.model.lossless.packing import pack

INDEX = "model.safetensors.index.json"
SHARD = "model-{:05}-of-{:05}.safetensors"


def trained(*shape: int, seed: int = 0, odd: float = 0.0, zeros: float = 0.003) -> torch.Tensor:
    """Values as training leaves them, with a share of any bit patterns and of exact zeros."""
    generator = np.random.default_rng([seed, *shape])
    values = torch.from_numpy(generator.normal(0, 0.02, shape)).bfloat16()
    patterns = torch.from_numpy(generator.integers(-(2**15), 2**15, shape, dtype=np.int16)).view(torch.bfloat16)
    values = torch.where(torch.from_numpy(generator.random(shape) < odd), patterns, values)
    return values.masked_fill(torch.from_numpy(generator.random(shape) < zeros), 0.0)


def every_pattern() -> torch.Tensor:
    """A matrix that gets smaller in both forms and has all 65,536 patterns of bfloat16."""
    values = trained(4096, 1024)
    values.view(-1)[::64] = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    return values


def small() -> dict[str, torch.Tensor]:
    """Tensors that both forms pack, and of every kind that none does."""
    return {
        "model.embed_tokens.weight": trained(250, 64, odd=0.002),
        "model.layers.0.gate.weight": trained(128, 66, odd=0.002),
        "model.layers.0.experts": trained(3, 64, 64),
        "model.norm.weight": trained(64),
        "ünïcode ☃.weight": trained(64, 128),
        "odd width": trained(64, 33),
        "float": torch.randn(8, 8),
        "half": torch.randn(8, 8).half(),
        "bool": torch.tensor([True, False, True]),
        "none": torch.empty(0, 64, dtype=torch.bfloat16),
        "no rank": torch.tensor(1.5).bfloat16(),
    }


def write(folder: Path, shards: Sequence[Mapping[str, torch.Tensor]], config: object = None) -> Path:
    """A checkpoint of so many files, with others beside."""
    folder.mkdir(parents=True, exist_ok=True)
    if len(shards) == 1:
        save_file(dict(shards[0]), folder / "model.safetensors", metadata={"format": "pt", "note": 'ÿ\n"'})
    else:
        names = [SHARD.format(number + 1, len(shards)) for number in range(len(shards))]
        for name, tensors in zip(names, shards, strict=True):
            save_file(dict(tensors), folder / name)
        where = {tensor: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (folder / "config.json").write_text(json.dumps(config or {"architectures": ["X"]}))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_bytes(b"\x00\xff")
    (folder / "empty.txt").write_bytes(b"")
    return folder


def write_packed(folder: Path, form: Form) -> tuple[Path, Path]:
    """A small checkpoint of two files, and the same packed."""
    tensors = list(small().items())
    source = write(folder / "source", [dict(tensors[:5]), dict(tensors[5:])])
    pack(source, folder / form, form)
    return source, folder / form


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def bits(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """All bytes of it."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
