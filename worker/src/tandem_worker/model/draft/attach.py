"""Gives a model its draft head: the one that the configuration names, else the checkpoint's own module."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from tandem_api.launch import SpeculativeConfig

    from tandem_worker.model.contract import CausalLM


def attach_head(model: CausalLM, path: Path, draft: Path | None, config: SpeculativeConfig) -> CausalLM:
    """`model`, which is at `path`, with the head in the folder `draft`, or with the one of its own checkpoint, or as it
    is where there is neither. Raises StartupError where a head is asked for that cannot be computed."""
    if draft is not None:
        from tandem_worker.model.draft.load import load_draft

        return load_draft(draft, model, path)
    if config.method == "Draft" or (config.may_use_own_head and getattr(model, "num_prediction_layers", 0)):
        from tandem_worker.model.draft.own import add_own_head

        return add_own_head(path, model, config.method)
    return model
