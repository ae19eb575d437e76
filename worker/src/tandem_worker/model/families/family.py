"""What a model family is to the rest of the worker: how it loads, and what it says about checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem_worker.model.assembly.build import Build
from tandem_worker.model.config import ModelConfig
from tandem_worker.model.contract import CausalLM
from tandem_worker.model.keys import ConfigKeys

if TYPE_CHECKING:
    from tandem_worker.model.layers.latent import LatentLayer

LoadFunction = Callable[[ModelConfig, Build], CausalLM]
Ignorable = Mapping[str, str]
"""Pattern of tensor names, matched from their start and without a multimodal checkpoint's prefix, to the reason."""


def nothing_ignorable(_config: ModelConfig) -> Ignorable:
    """For families whose checkpoints hold nothing but what their model computes with: no patterns."""
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a published architecture is served."""

    load: LoadFunction
    keys: ConfigKeys
    ignorable: Callable[[ModelConfig], Ignorable] = nothing_ignorable
    """Tensors that checkpoints of the family hold and that its language model does not compute with."""
    load_prediction_layer: Callable[[ModelConfig, Build, int], LatentLayer] | None = None
    """Loads the layer of that number inside a module for multi-token prediction (`model.draft.prediction`); None:
    checkpoints of the family have no such modules."""
