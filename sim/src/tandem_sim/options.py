"""What the command line is given: targets, durations, a GPU and a model or a measured profile."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import cast

from tandem_operator.autoscale.plan.contract import Target

from tandem_sim.profiles import GPUS, MODELS, WorkerProfile, build_profile

SLO_EXAMPLE = "ttft=2s+0.1s/1k,tpot=30ms"
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(ms|s)")
_POSITIVE = ("prefill_token_seconds", "step_seconds", "kv_tokens")
_PER_TOKENS = re.compile(r"(.+)/(\d*)(k?)")


class OptionError(ValueError):
    """What was given and what to give instead."""


def parse_slo(text: str, attain: float) -> tuple[Target, Target]:
    """Targets for the first token and for the mean of the other tokens, from `ttft=2s+0.1s/1k,tpot=30ms`.

    `attain` is the share of requests that must meet both. Raises OptionError.
    """
    given: dict[str, str] = {}
    for part in text.replace(" ", "").split(","):
        name, _, value = part.partition("=")
        if name not in {"ttft", "tpot"}:
            raise OptionError(f"--slo {text}: {name!r} is no target; write {SLO_EXAMPLE}")
        given[name] = value
    for name in ("ttft", "tpot"):
        if name not in given:
            raise OptionError(f"--slo {text}: {name} is missing; write {SLO_EXAMPLE}")
    fixed, _, slope = given["ttft"].partition("+")
    first = Target(
        percentile=attain, seconds=parse_seconds(fixed, "ttft"), seconds_per_token=_parse_slope(slope) if slope else 0.0
    )
    return first, Target(percentile=attain, seconds=parse_seconds(given["tpot"], "tpot"))


def parse_seconds(text: str, name: str) -> float:
    """`30ms` or `2s`. Raises OptionError."""
    found = _DURATION.fullmatch(text)
    if found is None or float(found[1]) <= 0:
        raise OptionError(f"{name}: {text!r} is no duration; write for example 30ms or 2s")
    return float(found[1]) * (0.001 if found[2] == "ms" else 1.0)


def _parse_slope(text: str) -> float:
    """Seconds per prompt token of `0.1s/1k`."""
    found = _PER_TOKENS.fullmatch(text)
    if found is None or not int(found[2] or 1):
        raise OptionError(f"ttft: {text!r} is no time per prompt tokens; write for example 0.1s/1k")
    tokens = int(found[2] or 1) * (1000 if found[3] else 1)
    return parse_seconds(found[1], "ttft") / tokens


def find_profile(gpu: str, model: str, file: Path | None) -> WorkerProfile:
    """The roofline of a model on a GPU, or what a file says of a worker. Raises OptionError."""
    if file is not None:
        return read_profile(file)
    if gpu not in GPUS:
        raise OptionError(f"--gpu {gpu} is not known; known are {', '.join(GPUS)}, or measure one and give --profile")
    if model not in MODELS:
        raise OptionError(f"--model {model} is not known; known are {', '.join(MODELS)}, or give --profile")
    try:
        return build_profile(MODELS[model], GPUS[gpu])
    except ValueError as error:
        raise OptionError(f"{error}; give --profile for a worker of several GPUs") from error


def read_profile(file: Path) -> WorkerProfile:
    """A JSON object with the fields of a WorkerProfile, alone or as `profile` of another object. Raises OptionError."""
    try:
        document = cast("object", json.loads(file.read_text()))
    except (OSError, ValueError) as error:
        raise OptionError(f"--profile {file} cannot be read: {error}") from error
    if isinstance(document, dict) and "profile" in document:
        document = cast("dict[str, object]", document)["profile"]
    row = cast("dict[str, object]", document) if isinstance(document, dict) else {}
    known = [field.name for field in fields(WorkerProfile)]
    for name in ("name", "source", *_POSITIVE):
        if name not in row:
            raise OptionError(f"--profile {file}: {name} is missing; a profile has {', '.join(known)}")
    for name, value in row.items():
        if name not in known:
            raise OptionError(f"--profile {file}: {name} is unknown; a profile has {', '.join(known)}")
        if name in {"name", "source"}:
            if not isinstance(value, str):
                raise OptionError(f"--profile {file}: {name} is {value!r}; write a text")
        elif not _is_count(value) or (name in _POSITIVE and not value):
            raise OptionError(f"--profile {file}: {name} is {value!r}; write a number above 0")
    return WorkerProfile(**row)  # type: ignore[arg-type]


def _is_count(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
