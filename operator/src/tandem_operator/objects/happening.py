"""Something that is worth a Kubernetes Event on the model: found by pure parts, written by `kube.recorder`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """One Event to record on the model."""

    kind: Literal["Normal", "Warning"] = "Normal"
    reason: str
    message: str
