"""One engine step on its way from plan to tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tandem_worker.engine.execute.batch import LogitsLayout
from tandem_worker.engine.schedule.plan import StepPlan

if TYPE_CHECKING:
    import torch

    from tandem_worker.engine.execute.host_copy import HostCopy


class StepAbandonedError(Exception):
    """Raised between layers: nobody waits for this step's result any more."""


class StepOutput(NamedTuple):
    """What the model made of a plan."""

    logits: torch.Tensor
    """`[N, vocab]`, float32."""
    layout: LogitsLayout
    """Tells whose rows those are."""


@dataclass(slots=True, eq=False)
class PendingStep:
    """A planned step. Whoever launches it sets `output`, or `error` when that failed."""

    plan: StepPlan
    on_layer: Callable[[int], None] | None
    """To be called after each layer of the forward pass with its index; raises StepAbandonedError."""
    began: float
    """`time.perf_counter()` before it was planned."""
    output: StepOutput | None = None
    chosen: HostCopy | None = None
    """The tokens, when they were chosen at launch; else `finish_step` chooses them."""
    checked: HostCopy | None = None
    """In place of `chosen` where there are guesses: the tokens at all their places (`Sampler.choose_checked`)."""
    error: Exception | None = None
