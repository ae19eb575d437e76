"""Keeps the operator from fighting for ever with something else that writes the same objects.

What somebody changes is put right at once. Where that has to be done again and again, the same thing of the same
object with nothing else written of it in between, each time comes later than the one before, and the object is told to
be contested. What is wanted anew is written at once: replicas that go to and fro are no fight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from tandem_api.crd.status import Condition
from tandem_api.names import FIELD_MANAGER
from tandem_api.wording import name_some

from tandem_operator.objects.manifests import ChildKey, Manifest, ModelKey, dig_list, parse_time

CONTESTED = "Contested"
FREE = 3
"""Times that the same thing is written again at once."""
_FIRST_SECONDS, _LONGEST_SECONDS = 5.0, 300.0
_OVER_SECONDS = 2 * _LONGEST_SECONDS
"""Without a change by somebody else for so long, a fight is over."""
_NAMED = 5


@dataclass(slots=True)
class _Object:
    written: str = ""
    """The last thing."""
    repeats: int = 0
    last: float = 0.0
    writer: str = ""


class Contention:
    """What was written of each object lately. Not thread-safe: it belongs to one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._models: dict[ModelKey, dict[ChildKey, _Object]] = {}

    def wait(self, model: ModelKey, child: ChildKey, content: str) -> float:
        """Seconds until this may be written of a child; 0: now."""
        found = self._find(model, child)
        if found is None or content != found.written or found.repeats < FREE:
            return 0.0
        pause = min(_LONGEST_SECONDS, _FIRST_SECONDS * 2 ** (found.repeats - FREE))
        return max(0.0, found.last + pause - self._clock())

    def is_contested(self, model: ModelKey, child: ChildKey) -> bool:
        found = self._find(model, child)
        return found is not None and found.repeats >= FREE - 1

    def note(self, model: ModelKey, child: ChildKey, content: str, *, writer: str = "") -> None:
        """This was written. `writer` is who had written something else, as far as that is known."""
        found = self._find(model, child) or _Object()
        self._models.setdefault(model, {})[child] = found
        if content == found.written:
            found.repeats += 1
            found.writer = writer or found.writer
        else:
            found.written, found.repeats = content, 0
        found.last = self._clock()

    def forget(self, model: ModelKey) -> None:
        """The model is gone, or another operator's."""
        self._models.pop(model, None)

    def condition(self, model: ModelKey) -> list[Condition]:
        """Which objects somebody else writes, and who; nothing where nobody does."""
        objects = {child: self._find(model, child) for child in sorted(self._models.get(model, {}))}
        found = {child: each for child, each in objects.items() if each is not None and each.repeats >= FREE}
        if not found:
            return []
        told = [f"{child} ({each.writer or 'nobody says who'})" for child, each in found.items()]
        text = (
            f"something else writes what the operator writes: {name_some(told, _NAMED)}. What it writes is put"
            f" right ever more rarely, every {_LONGEST_SECONDS / 60:g} minutes in the end: stop it, or let it leave"
            " these objects alone"
        )
        return [Condition(type=CONTESTED, status="True", reason="OtherWriter", message=text)]

    def _find(self, model: ModelKey, child: ChildKey) -> _Object | None:
        """What is remembered of a child, but for a fight that is over."""
        found = self._models.get(model, {}).get(child)
        if found is not None and found.repeats and self._clock() - found.last > _OVER_SECONDS:
            del self._models[model][child]
            return None
        return found


def last_writer(live: Manifest | None, *, subresource: str = "") -> str:
    """Who wrote an object last, in words."""
    if live is None:
        return "something deletes it"
    entries = [e for e in dig_list(live, "metadata", "managedFields") if (e.get("subresource") or "") == subresource]
    if not entries:
        return ""
    others = [entry for entry in entries if entry.get("manager") != FIELD_MANAGER]
    last, other = (max(each, key=_time, default=Manifest()) for each in (entries, others))
    # Times are whole seconds, and a tool that insists writes again within one.
    if not other or _time(last) - _time(other) > _TOGETHER:
        return f"another operator of Tandem, as {FIELD_MANAGER}"
    return f"the manager {other.get('manager')}"


_TOGETHER = timedelta(seconds=30)


def _time(entry: Manifest) -> datetime:
    return parse_time(entry.get("time")) or datetime.min.replace(tzinfo=UTC)


def soonest(waits: Iterable[float]) -> float | None:
    """Seconds until the first of some moments that are yet to come."""
    return min((wait for wait in waits if wait > 0), default=None)
