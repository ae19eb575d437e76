"""Things in turn of whoever has most: what is given up where there is no room, so that no address keeps others out."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Sources(Generic[T]):
    """Things of many sources, each with a size. Adding, changing and taking away are O(1); `find_excess` is O(sources),
    and for where there is no room."""

    __slots__ = ("_things", "_used")

    def __init__(self) -> None:
        self._things: dict[str, dict[T, None]] = {}
        """The things of each source, the newest last."""
        self._used: dict[str, int] = {}

    def used(self, source: str) -> int:
        """The sizes of what this source has."""
        return self._used.get(source, 0)

    def add(self, source: str, thing: T, size: int = 1) -> None:
        """It has this thing, or so much more of it; `size` may be negative."""
        things = self._things.get(source)
        if things is None:
            things = self._things[source] = {}
        things[thing] = None
        self._used[source] = self._used.get(source, 0) + size

    def remove(self, source: str, thing: T, size: int = 1) -> None:
        """It has this thing no more, whose size was this. Safe for one that it does not have."""
        things = self._things.get(source)
        if things is None or thing not in things:
            return
        del things[thing]
        if things:
            self._used[source] -= size
        else:
            del self._things[source], self._used[source]

    def newest(self, source: str) -> Iterator[T]:
        """What it has, the newest first."""
        return reversed(self._things[source])

    def oldest(self, source: str) -> T:
        """What it has had for longest."""
        return next(iter(self._things[source]))

    def find_most(self) -> str:
        """Who has most. Somebody must have something."""
        return max(self._used, key=self._used.__getitem__)

    def find_excess(self, source: str, size: int = 1) -> str | None:
        """Who has most, where that is somebody else who has as much as `source` even without `size`; else None."""
        most = self.find_most()
        if most == source or self._used[most] - size < self._used.get(source, 0):
            return None
        return most
