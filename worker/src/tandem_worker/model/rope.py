"""The rotary embedding's settings, in both layouts in use: `rope_parameters`, and `rope_theta` with `rope_scaling`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem_worker.host.errors import StartupError
from tandem_worker.model.keys import ConfigKeys, Settings, refuse_keys

_ORIGINAL = "original_max_position_embeddings"
SCALING_KEYS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor", _ORIGINAL, "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "attention_factor"),
}
"""What each kind of scaling reads."""
_SAYS_NOTHING = ("finetuned",)  # whether a model was trained with the scaling, not how to compute it


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: base and scaling. `scaling` is empty for the plain kind."""

    theta: float
    kind: str = "default"
    scaling: Mapping[str, Any] = field(default_factory=dict)


def parse_rope(
    settings: Settings, keys: ConfigKeys, *, architecture: str, max_position_embeddings: int, where: str
) -> RopeConfig:
    """What transformers makes of the same settings: a `rope_scaling` that is not empty replaces `rope_parameters`.

    Raises StartupError for kinds that are not known, and for keys that the kind does not read.
    """
    name = "rope_scaling" if settings["rope_scaling"] else "rope_parameters"
    given = settings[name]
    if given is None:
        given = keys.rope_parameters
    if not isinstance(given, Mapping):
        raise StartupError("ConfigInvalid", f"{where}: {name} is {given!r:.200}; it must be an object.")
    scaling = {key: value for key, value in given.items() if key not in _SAYS_NOTHING}
    theta = scaling.pop("rope_theta", None)
    kind, older = scaling.pop("rope_type", None), scaling.pop("type", None)
    if None not in (kind, older) and kind != older:
        raise StartupError("ConfigInvalid", f"{where}: {name} has the types {kind!r} and {older!r}; one is meant.")
    kind = str(kind or older or "default")
    if kind not in keys.rope_kinds:
        raise refuse_keys(
            [f"{name}.rope_type is {kind!r:.60} (known: {', '.join(keys.rope_kinds)})"],
            architecture=architecture,
            where=where,
        )
    problems = [
        f"{name}.{key} is {value!r:.60} (not a key of type {kind})"
        for key, value in scaling.items()
        if key not in SCALING_KEYS[kind] and value is not None and (key, value) != ("partial_rotary_factor", 1.0)
    ]
    if problems:
        raise refuse_keys(problems, architecture=architecture, where=where)
    scaling = {key: value for key, value in scaling.items() if key in SCALING_KEYS[kind]}
    if _ORIGINAL in SCALING_KEYS[kind]:
        scaling.setdefault(_ORIGINAL, max_position_embeddings)
    theta = next(value for value in (theta, settings["rope_theta"], keys.rope_theta) if value is not None)
    if isinstance(theta, bool) or not isinstance(theta, (int, float)) or not theta > 0:
        raise StartupError("ConfigInvalid", f"{where}: rope_theta is {theta!r}; it must be a positive number.")
    return RopeConfig(theta=float(theta), kind=kind, scaling=scaling)
