"""The way in for a checkpoint's own module for multi-token prediction: whether it is a draft head here, and loading it.

What is decided depends on the checkpoint, the configuration and the kind of machine alone, not on a rank's share: all
workers of a model have blocks of one form.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch
from tandem_api.wording import name_some

from tandem_worker.host.errors import StartupError
from tandem_worker.model.assembly.build import Build
from tandem_worker.model.assembly.decoder import DecoderLM
from tandem_worker.model.assembly.embedding import load_embedding, load_lm_head, vocabulary_share
from tandem_worker.model.backends.contract import BackendName
from tandem_worker.model.backends.select import find_backend, select_backend
from tandem_worker.model.checkpoint.contract import WeightSource
from tandem_worker.model.checkpoint.loader import Part
from tandem_worker.model.checkpoint.stored import Slice
from tandem_worker.model.config import ModelConfig
from tandem_worker.model.contract import CausalLM
from tandem_worker.model.coverage import (
    EMBEDDING,
    OUTPUT,
    SHOWN,
    find_left,
    find_taken,
    incidental_patterns,
    settle_output_matrix,
)
from tandem_worker.model.draft.drafted import DraftedLM
from tandem_worker.model.draft.head import Embed, Output
from tandem_worker.model.draft.prediction import LastStates, PredictionHead, name_module
from tandem_worker.model.draft.reading import build_loader
from tandem_worker.model.families.registry import find_family
from tandem_worker.model.load import find_prefix, open_checkpoint

if TYPE_CHECKING:
    from tandem_api.launch import SpeculativeMethod

logger = logging.getLogger(__name__)

_OWN_EMBEDDING, _OWN_OUTPUT = "embed_tokens.weight", "shared_head.head.weight"
"""What a module shares with the model, and checkpoints have a second time."""
_PIECE = 4096
"""Rows of two matrices that are compared at a time."""
_OTHERWISE = (
    "Name a head in engine.speculative.draft, or choose Lookup or Auto for engine.speculative.method, which need none."
)


def add_own_head(
    path: Path, model: CausalLM, method: SpeculativeMethod, *, backend: BackendName | None = None
) -> CausalLM:
    """`model`, which is at `path`, with the checkpoint's own module for multi-token prediction as its draft head.

    Under `Draft` raises StartupError with a reason and a sentence where that cannot be. Under `Auto` the model is
    returned as it is then, and where answers might differ by guessing; the log says why.
    """
    config, source = open_checkpoint(path)
    if method == "Draft":
        check_own_head(config, source)
    else:
        try:
            _check(config, source)
        except StartupError as error:
            return _leave_out(model, str(error), logging.WARNING)
    if model.device.type != "cpu":
        if method == "Draft":
            _refuse(f"Draft heads run on CPUs so far. {_OTHERWISE}")
        return _leave_out(model, "draft heads run on CPUs so far")
    assert isinstance(model, DecoderLM), "families with such modules are decoders"
    if method == "Auto" and model.inexact_layers is not None:
        return _leave_out(model, f"answers might differ from those without it, because {model.inexact_layers}")
    with torch.inference_mode():
        drafted = _load(config, source, model, backend)
    number, count = model.num_layers, model.num_prediction_layers
    logger.info(
        "the model's own module for multi-token prediction is its draft head",
        extra={"layer": number} | ({} if count == 1 else {"modules_left_out": count - 1}),
    )
    return drafted


def check_own_head(config: ModelConfig, source: WeightSource) -> None:
    """Whether a checkpoint has a module for multi-token prediction, complete and nothing else, before anything of it is
    read: `Draft` without a head asks for one. Raises StartupError, which says what to choose instead."""
    try:
        _check(config, source)
    except StartupError as error:
        raise StartupError(error.reason, f"{error} {_OTHERWISE}") from error


def _check(config: ModelConfig, source: WeightSource) -> None:
    load_layer = find_family(config.architecture).load_prediction_layer
    if load_layer is None or config.num_prediction_layers < 1:
        says = "is not of an architecture that has them" if load_layer is None else "has num_nextn_predict_layers 0"
        _refuse(
            "The method is Draft and no head is named, so the model's own modules for multi-token prediction would "
            f"guess, but the model {says}."
        )
    prefix = find_prefix(source)
    try:
        taken = find_taken(source, prefix, lambda build: _list_parts(config, build))
    except StartupError as error:
        raise StartupError(
            error.reason,
            "The model's own module for multi-token prediction, which num_nextn_predict_layers announces, cannot be "
            f"computed: {error}",
        ) from error
    left = find_left(source, prefix + name_module(config), taken, incidental_patterns(config), prefix)
    if left:
        raise StartupError(
            "UnusedWeights",
            "The model's own module for multi-token prediction has tensors that are not computed with here: "
            f"{name_some(left, SHOWN)}.",
        )


def _list_parts(config: ModelConfig, build: Build) -> None:
    """Ask for everything that a module is made of, and for what it may share with the model."""
    shape, name = (config.vocab_size, config.hidden_size), name_module(config)
    _load_head(config, build, lambda tokens: tokens, lambda states: states)
    for shared in (name + _OWN_EMBEDDING, name + _OWN_OUTPUT):
        if build.loader.has(shared):
            build.loader.load(shared, shape)


def _load(config: ModelConfig, source: WeightSource, model: DecoderLM, backend: BackendName | None) -> DraftedLM:
    prefix, states = find_prefix(source), LastStates(model)
    if not model.context.is_last_stage:
        return DraftedLM(model, states, None)
    parts = find_backend(backend or select_backend(model.device, model.dtype))
    loader = build_loader(source, model, parts, prefix)
    # Lanes guess at times of their own, so each has all experts of the module.
    context = replace(model.context, ep_rank=0, ep_size=1, ep=None)
    build = Build(loader=loader, backend=parts, context=context)
    config = settle_output_matrix(config, source, prefix)
    head = _load_head(config, build, _find_embedding(config, build, model), _find_output(config, build, model))
    return DraftedLM(model, states, head)


def _load_head(config: ModelConfig, build: Build, embed: Embed, output: Output) -> PredictionHead:
    load_layer = find_family(config.architecture).load_prediction_layer
    assert load_layer is not None, "asked of families with such modules alone"
    return PredictionHead(config, build, load_layer(config, build, config.num_layers), embed, output)


def _find_embedding(config: ModelConfig, build: Build, model: DecoderLM) -> Embed:
    """The model's, where this stage has it and the checkpoint holds no other one for the module."""
    own = name_module(config) + _OWN_EMBEDDING
    has_own, shape = build.loader.has(own), (config.vocab_size, config.hidden_size)
    if model.embeds and not (has_own and _differ(build, own, EMBEDDING, shape)):
        return model.embed
    return load_embedding(build, own if has_own else EMBEDDING, shape)


def _find_output(config: ModelConfig, build: Build, model: DecoderLM) -> Output:
    """The model's, unless the checkpoint holds another one for the module."""
    own, theirs = name_module(config) + _OWN_OUTPUT, EMBEDDING if config.tie_word_embeddings else OUTPUT
    shape = config.vocab_size, config.hidden_size
    if not (build.loader.has(own) and _differ(build, own, theirs, shape)):
        return model.output
    return load_lm_head(build, shape, tied=None, name=own)


def _differ(build: Build, one: str, other: str, shape: tuple[int, int]) -> bool:
    """Whether two matrices over the vocabulary have different elements in this rank's rows."""
    loader = build.loader
    share = vocabulary_share(shape[0], build.context) or Slice(0, 0, shape[0])
    for start in range(share.start, share.stop, _PIECE):
        piece = Slice(0, start, min(start + _PIECE, share.stop))
        mine, theirs = (loader.read(Part(name=name, shape=shape, piece=piece)) for name in (one, other))
        if not torch.equal(mine.to(loader.dtype), theirs.to(loader.dtype)):
            return True
    return False


def _leave_out(model: CausalLM, why: str, level: int = logging.INFO) -> CausalLM:
    logger.log(level, "the model's own module for multi-token prediction is left out", extra={"why": why})
    return model


def _refuse(why: str) -> NoReturn:
    raise StartupError("DraftUnsupported", why)
