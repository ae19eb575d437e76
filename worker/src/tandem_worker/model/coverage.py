"""Whether a checkpoint holds what its configuration says, before any of it is read.

A tensor that nothing takes is a part of the computation that is missing here. Which ones the model takes is asked of
the model itself, loaded whole and without content: so every rank comes to the same answer, whatever share it reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace

import torch
from tandem_api.wording import name_some

from tandem_worker.host.errors import StartupError
from tandem_worker.host.postponed import load_shape_functions
from tandem_worker.model.assembly.build import Build
from tandem_worker.model.backends.torch.layers import TORCH
from tandem_worker.model.checkpoint.contract import WeightSource
from tandem_worker.model.checkpoint.loader import WeightLoader
from tandem_worker.model.checkpoint.names import NameRecorder
from tandem_worker.model.config import ModelConfig
from tandem_worker.model.families.family import Family
from tandem_worker.parallel.context import SINGLE

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"
SHOWN = 4
"""Tensors that an error names."""
_ROTARY = r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)$"
_ACTIVATION_SCALES = r".*\.([qkv]_|kv_|input_|output_)(scale|zero_point)$"


def settle_output_matrix(config: ModelConfig, source: WeightSource, prefix: str) -> ModelConfig:
    """A checkpoint that calls its output matrix tied may hold one: it is the embedding's then only if it equals it."""
    head, embedding = prefix + OUTPUT, prefix + EMBEDDING
    if not config.tie_word_embeddings or config.embedding is not None or head not in source or embedding not in source:
        return config
    tied = source.shape(head) == source.shape(embedding) and torch.equal(source.read(head), source.read(embedding))
    return replace(config, tie_word_embeddings=tied)


def check_coverage(config: ModelConfig, family: Family, source: WeightSource, prefix: str) -> set[str]:
    """The tensors that the whole model takes. Raises StartupError for one that is missing or of another shape, and for
    those that nothing takes."""
    taken = find_taken(source, prefix, lambda build: family.load(config, build))
    unused = find_unused(config, family, source, taken, prefix)
    if not unused:
        return taken
    raise StartupError(
        "UnusedWeights",
        f"The checkpoint holds tensors that {config.architecture} is not computed with here: "
        f"{name_some(unused, SHOWN)}. Without them its answers would be wrong. Either config.json does not say what "
        "they are for (compare it with the published one), or the model is a variant that is not supported.",
    )


def find_taken(source: WeightSource, prefix: str, load: Callable[[Build], object]) -> set[str]:
    """Tensors that are read by what `load` makes whole of a checkpoint, which has no content here. Raises
    StartupError for a tensor that is missing or of another shape."""
    recorder = NameRecorder(source)
    loader = WeightLoader(
        recorder,
        dtype=torch.float32,
        device=torch.device("meta"),
        keeps_packed=False,
        prefix=prefix,
    )
    build = Build(loader=loader, backend=TORCH, context=SINGLE)
    try:
        load(build)
    except NotImplementedError:
        load_shape_functions()  # what serving does not need, and a layer that computes with its weights may
        load(build)
    return recorder.taken


def find_unused(config: ModelConfig, family: Family, source: WeightSource, taken: set[str], prefix: str) -> list[str]:
    """Tensors of the checkpoint that the model does not take and that it is not known to do without, sorted."""
    return find_left(source, "", taken, ignorable_patterns(config, family), prefix)


def find_left(
    source: WeightSource, begin: str, taken: AbstractSet[str], ignorable: Iterable[str], prefix: str
) -> list[str]:
    """Tensors whose names begin so, that are not `taken` and fit to no pattern, sorted. Patterns are of names without
    `prefix`."""
    patterns = [re.compile(pattern) for pattern in ignorable]
    left = [
        name
        for name in source.names()
        if name.startswith(begin)
        and name not in taken
        and not any(pattern.match(name.removeprefix(prefix)) for pattern in patterns)
    ]
    return sorted(name for name in left if not _adds_nothing(name, source))


def ignorable_patterns(config: ModelConfig, family: Family) -> Mapping[str, str]:
    """Patterns of names without prefix, and why answers do not depend on such tensors."""
    patterns = {**incidental_patterns(config), **family.ignorable(config)}
    if config.embedding is not None:
        patterns[r"lm_head\."] = "an embedding model has no output matrix"
    elif config.tie_word_embeddings:
        patterns[re.escape(OUTPUT)] = "equal to the embedding, which is used for it"
    return patterns


def incidental_patterns(config: ModelConfig) -> dict[str, str]:
    """As `ignorable_patterns`, of tensors inside any layer."""
    patterns = {_ROTARY: "frequencies that follow from the configuration"}
    if config.quantization:
        patterns[_ACTIVATION_SCALES] = "activations, keys and values are not quantized here"
    return patterns


def _adds_nothing(name: str, source: WeightSource) -> bool:
    """Some quantizers write a bias of zeros beside every matrix."""
    return name.endswith(".bias") and not bool(source.read(name).any())
