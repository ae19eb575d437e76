"""From what the API server sends, or keeps, to typed data.

The CRD is structural, so the API server drops fields that it does not know, at every level but those that are free by
design (`podTemplate` and parts of `affinity`, which are not looked into here). A field that arrives and has no type is
therefore no slip of the pen: the CRD, or what wrote a revision, is of another release than this operator. Such fields
are read past and named. A value that cannot be read is another matter, because what it stands for is not known.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from pydantic import BaseModel, ValidationError
from tandem_api.crd.resource import InferenceModel
from tandem_api.crd.spec import InferenceModelSpec
from tandem_api.crd.status import InferenceModelStatus

from tandem_operator.objects.errors import InvalidSpecError
from tandem_operator.objects.manifests import Manifest, dig

MOST_LEVELS = 100
"""A pod template has about fifteen."""
_Step = int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReading:
    """An InferenceModel as far as this release knows it."""

    model: InferenceModel
    unknown: tuple[str, ...] = ()
    """Paths of the fields that it does not know, such as `spec.engine.lookahead`."""


def read_model(raw: Manifest) -> ModelReading:
    """The typed object, without the fields that this release does not know.

    Raises:
        InvalidSpecError: the installed schema admits values that this release cannot read; the sentence names every
            one, and the unknown fields. Or it is nested so deeply that nothing of it can be written.
    """
    if is_too_deep(raw):
        raise InvalidSpecError(
            f"spec is nested more than {MOST_LEVELS} levels deep, which no pod template is: look at podTemplate and "
            "affinity, and take out what does not belong there"
        )
    found = raw | {"status": parse_status(raw)}
    try:
        return ModelReading(model=InferenceModel.model_validate(found))
    except ValidationError as error:
        known, unknown = _drop_unknown(found, error)
    try:
        return ModelReading(model=InferenceModel.model_validate(known), unknown=unknown)
    except ValidationError as error:
        problems = [f"{_path(item['loc'])}: {item['msg'].removeprefix('Value error, ')}" for item in error.errors()]
        raise InvalidSpecError("; ".join([*problems, *(f"{path}: not known" for path in unknown)])) from error


def is_too_deep(raw: Manifest) -> bool:
    """Whether an object is nested beyond `MOST_LEVELS`. The API server takes up to 10,000 in the parts that are free by
    design; what reads and writes objects calls itself for each level."""
    level: list[Any] = [raw]
    for _ in range(MOST_LEVELS):
        level = [inner for each in level for inner in _look_into(each)]
        if not level:
            return False
    return True


def _look_into(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return cast(Manifest, value).values()
    return cast(list[Any], value) if isinstance(value, list) else ()


def read_past(raw: Manifest) -> InferenceModel | None:
    """What an object says besides values that cannot be read: to look at what runs by, and to make nothing from. None
    where too little is left, or it is nested too deeply."""
    if is_too_deep(raw):
        return None
    found = copy.deepcopy(without_unknown(InferenceModel, raw | {"status": parse_status(raw)})[0])
    for _ in range(_TRIES):
        try:
            return InferenceModel.model_validate(found)
        except ValidationError as error:
            # What is missing takes along what it is missing in. From the last item of a list on.
            places = [e["loc"][:-1] if e["type"] == "missing" else e["loc"] for e in reversed(error.errors())]
            if any(place in _COUNTED for place in places) or not sum(_remove(found, place) for place in places):
                return None
    return None


_TRIES = 8
"""Rules over several fields are judged after those of single ones."""
_COUNTED = frozenset(
    ("spec", *way)
    for way in (
        (), ("model",), ("suspend",), ("gateway",), ("gateway", "replicas"), ("autoscaling",),
        *(
            (role, *field)
            for role in ("prefill", "decode")
            for field in ((), ("replicas",), ("nodesPerReplica",), ("scaling",), ("scaling", "mode"))
        ),
    )
)  # fmt: skip
"""Without these nobody can say how much of what is promised is served."""


def without_unknown(kind: type[BaseModel], raw: Manifest) -> tuple[Manifest, tuple[str, ...]]:
    """`raw` without the fields that `kind` does not have, and their paths."""
    try:
        kind.model_validate(raw)
    except ValidationError as error:
        return _drop_unknown(raw, error)
    return raw, ()


def _drop_unknown(raw: Manifest, error: ValidationError) -> tuple[Manifest, tuple[str, ...]]:
    """`raw` without the fields that `error` says are not known, and their paths."""
    places = [item["loc"] for item in error.errors() if item["type"] == "extra_forbidden"]
    known = copy.deepcopy(raw) if places else raw
    return known, tuple(sorted(_path(place) for place in places if _remove(known, place)))


def known_spec(content: Manifest) -> Manifest:
    """What a kept part of a spec says that this release knows."""
    return without_unknown(InferenceModelSpec, content)[0]


def parse_status(raw: Manifest) -> InferenceModelStatus:
    """The status that was written last, without the values that cannot be read: an operator of a later release may have
    written them. A phase of a rollout that is not known becomes `Preparing`, which goes on from the revision that
    serves: workers are brought to that one, and a canary is tried anew."""
    status: Any = raw.get("status")
    if isinstance(status, InferenceModelStatus):
        return status
    found = copy.deepcopy(cast(Manifest, status)) if isinstance(status, dict) else Manifest()
    for attempt in range(_TRIES):
        try:
            return InferenceModelStatus.model_validate(found)
        except ValidationError as error:
            places = [e["loc"][:-1] if e["type"] == "missing" else e["loc"] for e in reversed(error.errors())]
        if _PHASE in places:
            found["rollout"]["phase"] = "Preparing"
            continue
        # What cannot be taken out by itself, or not for long, goes with the part that it is in.
        alone = attempt < _TRIES // 2 and sum(_remove(found, place) for place in places)
        for part in () if alone else {str(place[0]) for place in places if place}:
            found.pop(part, None)
    return InferenceModelStatus()


_PHASE = ("rollout", "phase")


def _remove(tree: Any, place: Sequence[_Step]) -> bool:
    """Take what stands at a place out of `tree`. False where nothing does."""
    holder, last = dig(tree, *place[:-1]), place[-1] if place else ""
    if isinstance(holder, dict) and last in holder:
        del holder[last]
        return True
    if isinstance(holder, list) and isinstance(last, int) and last < len(cast(list[Any], holder)):
        del holder[last]
        return True
    return False


def _path(location: Sequence[_Step]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in location).removeprefix(".")
