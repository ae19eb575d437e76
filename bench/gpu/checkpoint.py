"""A checkpoint of random weights as a hub has it: shards of safetensors, their index, a configuration, a tokenizer."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench.gpu.random_model import parse, plan_shapes

SHARD_BYTES = 5 << 30
"""Of one file at most, unless a tensor is larger."""
_PIECE = 1 << 24
"""Weights that are drawn; every matrix repeats them."""
_SCALE = 0.015
_END = "<|endoftext|>"


def write_checkpoint(folder: Path, raw: Mapping[str, Any], *, shard_bytes: int = SHARD_BYTES) -> int:
    """Write a dense Qwen3 of configuration `raw` into `folder`; bytes of its weights. Norms weigh 1."""
    (folder / "config.json").write_text(json.dumps(dict(raw)))
    write_tokenizer(folder, raw["vocab_size"])
    shards = plan_shards(plan_shapes(parse(raw)), shard_bytes)
    names = [f"model-{number + 1:05}-of-{len(shards):05}.safetensors" for number in range(len(shards))]
    places = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    total = sum(2 * math.prod(shape) for shard in shards for shape in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    drawn = np.random.default_rng(5).standard_normal(_PIECE, dtype=np.float32) * np.float32(_SCALE)
    piece = memoryview((drawn.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    with ThreadPoolExecutor(len(shards)) as writers:
        paths = [folder / name for name in names]
        list(writers.map(_write_shard, paths, shards, itertools.repeat(piece)))
    return total


def plan_shards(shapes: Mapping[str, tuple[int, ...]], shard_bytes: int) -> list[dict[str, tuple[int, ...]]]:
    """Tensors by file, in their order, each file as large as it may be."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    left = shard_bytes
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        if size > left and shards[-1]:
            shards.append({})
            left = shard_bytes
        shards[-1][name] = shape
        left -= size
    return shards


def _write_shard(path: Path, shapes: Mapping[str, tuple[int, ...]], piece: memoryview) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape in shapes.items():
        end = start + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (start, end)}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    one = np.array(1.0, np.float32).view(np.uint32) >> 16
    with path.open("wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            size = 2 * math.prod(shape)
            source = memoryview(np.full(shape, one, np.uint16).tobytes()) if len(shape) == 1 else piece
            while size:
                size -= file.write(source[: min(size, len(source))])


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Bytes, and merges of two and more of them until there are `vocab_size` tokens: as long to load as a real one."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: number for number, text in enumerate([_END, *letters])}
    merges: list[tuple[str, str]] = []
    for left, right in itertools.product(itertools.chain(letters, _pairs(letters)), letters):
        if len(vocabulary) >= vocab_size:
            break
        vocabulary[left + right] = len(vocabulary)
        merges.append((left, right))
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([_END])
    inner.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _END}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _pairs(letters: list[str]) -> itertools.chain[str]:
    return itertools.chain.from_iterable([one + other for other in letters] for one in letters)
