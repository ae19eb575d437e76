"""What a stage consists of: items, one after another in a lane's process, and lanes side by side in phases.

A lane's process writes down each item as it begins and ends. When it dies, hangs or its device is lost, whoever started
it starts another one behind the item that was under way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Figures = dict[str, Any]
"""What an item found, for JSON."""


class ItemStatus(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    """It ran, and what it found is wrong."""
    ERROR = "error"
    """It could not be completed."""
    TIMEOUT = "timeout"
    DIED = "died"
    """Its process ended under it."""
    SKIPPED = "skipped"
    """What it needs has not passed."""
    ABSENT = "absent"
    """A tool that the machine does not have."""
    NOT_RUN = "not run"
    """The time of its stage was over."""


GOOD = (ItemStatus.PASSED, ItemStatus.ABSENT)


class WrongError(Exception):
    """What an item found is wrong; `figures` are its evidence."""

    def __init__(self, message: str, figures: Figures) -> None:
        super().__init__(message)
        self.figures = figures


class AbsentError(Exception):
    """The machine lacks a tool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One thing to find out."""

    name: str
    run: Callable[[], Figures]
    seconds: float = 60.0
    """Its process is ended when it takes longer."""
    needs: tuple[str, ...] = ()
    """Items of this stage that must have passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a lane is told."""

    device: str
    """`cuda` or `cpu`."""
    tiny: bool
    commit: str = ""
    results: Mapping[str, Any] = field(default_factory=dict)
    """Items of this stage that have ended, by name."""
    out: str = ""
    """The folder of all results: other stages' may lie there."""

    @property
    def place(self) -> str:
        """As torch names the device that a worker computes on."""
        return "cuda:0" if self.device == "cuda" else self.device


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Lanes that may run side by side."""

    lanes: tuple[str, ...]
    """`module:function argument`, relative to this package."""
    seconds: float
    together: int = 1
    """How many at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A part of the half hour that can be repeated alone."""

    name: str
    what: str
    seconds: float
    phases: tuple[Phase, ...]
