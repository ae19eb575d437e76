"""Whether an engine guesses, and who does: by what is asked for and by what it computes with."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tandem_worker.engine.guess.costs import ON_CPU, ON_GPU, StepCosts
from tandem_worker.engine.guess.history import History
from tandem_worker.engine.guess.lookup import LookupGuesser
from tandem_worker.engine.guess.speculator import SpeculationSettings, Speculator
from tandem_worker.engine.sample.masks import is_quick

if TYPE_CHECKING:
    from collections.abc import Sequence as Rows

    from tandem_api.launch import SpeculativeConfig

    from tandem_worker.engine.drafting import Drafting
    from tandem_worker.engine.guess.contract import Guesser
    from tandem_worker.engine.schedule.request import Sequence
    from tandem_worker.model.contract import CausalLM

logger = logging.getLogger(__name__)


def build_speculators(
    config: SpeculativeConfig,
    model: CausalLM,
    draftings: Rows[Drafting] = (),
    *,
    runs_ahead: bool = False,
    num_lanes: int,
    max_rows: int,
) -> list[Speculator]:
    """One for each lane, which has texts and a history of its own; none where there are no guesses, and the log says
    why. `draftings`: one for each lane, where the model has a draft head."""
    why = find_obstacle(config, model)
    if why is not None:
        level = logging.INFO if config.method in {"Auto", "Off"} else logging.WARNING
        logger.log(level, "speculation is off", extra={"method": config.method, "why": why})
        return []
    logger.info(
        "speculation is on",
        extra={
            "method": " and ".join(["Draft"] * bool(draftings) + ["Lookup"] * (config.method != "Draft")),
            "max_tokens": config.max_tokens,
            "adaptive": config.adaptive,
        }
        | _describe_exactness(config, model),
    )
    config = config.model_copy(update={"history_bytes": config.history_bytes // num_lanes})
    on_gpu = model.device.type == "cuda"
    return [
        _build_speculator(
            config,
            drafting,
            StepCosts(ON_GPU if on_gpu else ON_CPU),
            max_rows=count_logits_rows(config, max_rows),
            most_rows=model.exact_rows if keeps_exact(config, model) else None,
            runs_ahead=runs_ahead,
        )
        for drafting in draftings or [None] * num_lanes
    ]


def count_logits_rows(config: SpeculativeConfig, max_running: int) -> int:
    """Rows of logits that a step may have, for which memory is to be set aside: of all sequences that run, or of one
    with all its guesses where those are more."""
    return max_running if config.method == "Off" else max(max_running, config.max_tokens + 1)


def keeps_exact(config: SpeculativeConfig, model: CausalLM) -> bool:
    """Whether guesses are in steps alone in which each row has the bits that it has alone."""
    return config.method == "Auto" and model.inexact is not None


def _describe_exactness(config: SpeculativeConfig, model: CausalLM) -> dict[str, str]:
    """For the log: what is promised where a row's bits may depend on its company."""
    if model.inexact is None:
        return {}
    if keeps_exact(config, model):
        return {"answers": f"are those without it: there are guesses in steps of up to {model.exact_rows} rows alone"}
    return {"answers": f"may differ in ties of logits: {model.inexact}"}


def _build_speculator(
    config: SpeculativeConfig,
    drafting: Drafting | None,
    costs: StepCosts,
    *,
    max_rows: int,
    most_rows: int | None,
    runs_ahead: bool,
) -> Speculator:
    history = History(config.history_bytes) if config.history_bytes and config.method != "Draft" else None

    def measure_bytes() -> int:
        return (0 if history is None else history.num_bytes) + (0 if drafting is None else drafting.num_bytes)

    return Speculator(
        _build_guesser(config, history, drafting, costs if config.adaptive else None),
        SpeculationSettings(max_tokens=config.max_tokens, adaptive=config.adaptive),
        max_rows=max_rows,
        most_rows=most_rows,
        runs_ahead=runs_ahead,
        may_guess=_may_guess,
        measure_bytes=measure_bytes,
        costs=costs,
    )


def _build_guesser(
    config: SpeculativeConfig, history: History | None, drafting: Drafting | None, costs: StepCosts | None
) -> Guesser:
    """Guesses by text, by the head, or by both."""
    lookup = LookupGuesser(history) if config.method != "Draft" else None
    if drafting is None:
        assert lookup is not None, "the method Draft has a head"
        return lookup
    from tandem_worker.engine.guess.draft import DraftGuesser

    return DraftGuesser(drafting.begin, drafting.block_size, lookup=lookup, costs=costs, may_guess=_may_guess)


def _may_guess(sequence: Sequence) -> bool:
    return is_quick(sequence.sampler_state)


def find_obstacle(config: SpeculativeConfig, model: CausalLM) -> str | None:
    """Why this engine does not guess, as a part of a sentence; None where it does."""
    if config.method == "Off":
        return "it is not asked for"
    if model.embedding is not None:
        return "the model generates no text"
    if config.method == "Auto" and model.inexact is not None and model.exact_rows == 1:
        return f"answers might differ from those without it, because {model.inexact}"
    return None
