"""One replica of a role, a pod or a group of pods, as rollouts and status count it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

WHOLE = "whole"
"""Stands for the build of replicas that need no partner, whichever it is."""


class ReplicaState(Enum):
    """Whether a replica serves."""

    READY = "ready"
    UNSURE = "unsure"
    DOWN = "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedReplica:
    """One replica of a role, some of whose pods exist."""

    index: int
    build: str
    """Its workers exchange blocks with those of the same build."""
    state: ReplicaState
    is_outdated: bool
    """Made from another template than the newest."""
    is_leaving: bool = False
    """All of its pods are on their way out."""
    is_starting: bool = False
    """It is not up, and may come up by itself."""
    is_whole: bool = False
    """It computes prompts too, so it serves without a partner: from before `spec.prefill` was added."""
