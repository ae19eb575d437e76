"""The way in: from a published head and a loaded model to a `DraftedLM`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from tandem_worker.host.errors import StartupError
from tandem_worker.model.assembly.build import Build
from tandem_worker.model.assembly.decoder import DecoderLM
from tandem_worker.model.assembly.embedding import load_embedding
from tandem_worker.model.backends.contract import BackendName
from tandem_worker.model.backends.select import find_backend, select_backend
from tandem_worker.model.checkpoint.loader import WeightLoader
from tandem_worker.model.config import CONFIG_FILE, ModelConfig, read_raw_config
from tandem_worker.model.contract import CausalLM
from tandem_worker.model.draft.config import TargetShape, parse_head_config
from tandem_worker.model.draft.drafted import DraftedLM
from tandem_worker.model.draft.eagle3 import Eagle3Head, Fusion
from tandem_worker.model.draft.head import Embed
from tandem_worker.model.draft.reading import build_loader
from tandem_worker.model.draft.weights import EMBEDDING, open_head, read_vocabulary
from tandem_worker.model.load import find_prefix, open_checkpoint

logger = logging.getLogger(__name__)


def load_draft(path: Path, model: CausalLM, target: Path, *, backend: BackendName | None = None) -> DraftedLM:
    """`model`, which is at `target`, with the head in the folder `path`, which computes in the model's type on its
    device. A rank of a group has its share of both: the head itself is on the last stage of a pipeline.

    `backend` None chooses as for models. Raises StartupError with a reason and a sentence where the head cannot be
    computed or belongs to another model.
    """
    if model.embedding is not None:
        raise StartupError("DraftMismatch", "The model computes embeddings: it generates no text that a head guesses.")
    if not isinstance(model, DecoderLM):
        raise StartupError("DraftUnsupported", f"A {type(model).__name__} gives out no states that a head could read.")
    if model.device.type != "cpu":
        raise StartupError(
            "DraftUnsupported",
            "Draft heads run on CPUs so far: leave engine.speculative.draft out, or set engine.device to CPU.",
        )
    with _explaining():
        return _load(path, model, target, backend)


def check_draft(path: Path, config: ModelConfig) -> None:
    """Whether the head in the folder `path` fits to a model with this configuration, by what can be told before
    anything of it is read. Raises StartupError."""
    target = TargetShape(vocab_size=config.vocab_size, hidden_size=config.hidden_size, num_layers=config.num_layers)
    with _explaining():
        source = open_head(path)
        head = parse_head_config(read_raw_config(path / CONFIG_FILE), target)
        read_vocabulary(source, head.draft_vocab_size, target.vocab_size)


@contextmanager
def _explaining() -> Iterator[None]:
    """Errors of checkpoints say which of the two is meant."""
    try:
        yield
    except StartupError as error:
        if str(error).startswith("The draft"):
            raise
        raise StartupError(error.reason, f"The draft head cannot be read: {error}") from error


def _load(path: Path, model: DecoderLM, checkpoint: Path, backend: BackendName | None) -> DraftedLM:
    source = open_head(path)
    target = TargetShape(vocab_size=model.vocab_size, hidden_size=model.hidden_size, num_layers=model.num_layers)
    config = parse_head_config(read_raw_config(path / CONFIG_FILE), target)
    if EMBEDDING not in source and config.layer.hidden_size != model.hidden_size:
        raise StartupError(
            "WeightsIncomplete",
            f"The draft head has no {EMBEDDING}, and the model's embedding has {model.hidden_size} elements where the "
            f"head's layer has {config.layer.hidden_size}.",
        )
    parts = find_backend(backend or select_backend(model.device, model.dtype))
    with torch.inference_mode():
        vocabulary = read_vocabulary(source, config.draft_vocab_size, config.layer.vocab_size)
        build = Build(loader=build_loader(source, model, parts), backend=parts, context=model.context)
        fusion = Fusion(config, build, model.layers)
        head = None
        if model.context.is_last_stage:
            embed = model.embed
            if EMBEDDING not in source and not model.embeds:
                embed = _load_model_embedding(checkpoint, model, build)
            head = Eagle3Head(config, build, embed)
    if head is not None:
        source.check_taken(Fusion.list_tensors(config) if model.context.pp_size > 1 else set())
        logger.info(
            "a draft head is loaded",
            extra={"features": list(config.feature_layers), "guesses": config.draft_vocab_size, "of": model.vocab_size},
        )
    return DraftedLM(model, fusion, head, vocabulary=vocabulary, num_kv_heads=config.layer.num_kv_heads)


def _load_model_embedding(checkpoint: Path, model: DecoderLM, build: Build) -> Embed:
    """The model's embedding on a stage that has none of its own."""
    _, source = open_checkpoint(checkpoint)
    prefix = find_prefix(source)
    loader = WeightLoader(source, dtype=model.dtype, device=model.device, keeps_packed=False, prefix=prefix)
    shape = model.vocab_size, model.hidden_size
    return load_embedding(replace(build, loader=loader), "model.embed_tokens.weight", shape)
