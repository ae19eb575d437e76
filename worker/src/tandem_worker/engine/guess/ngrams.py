"""Earlier places of the last few tokens of a text: in a text that is complete, and in one that grows.

Two lengths are looked for: runs of `LONG` tokens, then of `SHORT`. What is found is only where to look: keys of long
runs are hashes, so whoever asks compares the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

SHORT, LONG = 2, 4
MOST_TOKENS = 1 << 15
"""Most tokens of a text that are indexed, its last ones: 32 bytes for each of a complete one."""
_MIX = 0x9E3779B97F4A7C15 >> 2 | 1
_KEPT = (1 << 62) - 1


def short_key(tokens: Sequence[int]) -> int:
    """Key of a text's last `SHORT` tokens."""
    return tokens[-2] << 31 | tokens[-1]


def long_key(tokens: Sequence[int]) -> int:
    """Key of a text's last `LONG` tokens."""
    return ((tokens[-4] << 31 | tokens[-3]) * _MIX ^ (tokens[-2] << 31 | tokens[-1])) & _KEPT


def short_keys(tokens: Sequence[int]) -> np.ndarray:
    """Keys of all runs of `SHORT` tokens, in order: int64."""
    values = np.array(tokens, dtype=np.int64)
    return values[:-1] << 31 | values[1:]


def long_keys(shorts: np.ndarray) -> np.ndarray:
    """Keys of all runs of `LONG` tokens, in order, from the text's `short_keys`: int64."""
    with np.errstate(over="ignore"):
        return (shorts[:-2] * np.int64(_MIX) ^ shorts[2:]) & np.int64(_KEPT)


class CompleteIndex:
    """Index of a text that does not grow; shared by all who look into it."""

    __slots__ = ("_keys", "_places", "_singles", "tokens")

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens[-MOST_TOKENS:])
        self._singles: dict[int, int] | None = None
        self._keys: list[np.ndarray] = []
        self._places: list[np.ndarray] = []
        shorts = short_keys(self.tokens)
        for keys, length in ((shorts, SHORT), (long_keys(shorts), LONG)):
            order = np.argsort(keys, kind="stable")
            self._keys.append(keys[order])
            self._places.append((order + length).astype(np.int32))

    def find_single(self, token: int) -> int | None:
        """The place behind the last occurrence of a token. Takes 70 bytes more for each token from the first call on,
        which a text that is found again by its runs alone never has."""
        if self._singles is None:
            self._singles = dict(zip(self.tokens, range(1, len(self.tokens) + 1), strict=True))
        return self._singles.get(token)

    def find_last(self, key: int, *, long: bool) -> int | None:
        """The place behind the last run with this key; None where there is none."""
        keys = self._keys[long]
        at = int(keys.searchsorted(key, side="right")) - 1
        return int(self._places[long][at]) if at >= 0 and keys[at] == key else None

    def find_after(self, key: int, place: int, *, long: bool) -> int | None:
        """The first place at `place` or later that is behind such a run; where there is none, the last before it."""
        keys = self._keys[long]
        first, end = int(keys.searchsorted(key)), int(keys.searchsorted(key, side="right"))
        if first == end:
            return None
        places = self._places[long][first:end]
        return int(places[min(int(places.searchsorted(place)), end - first - 1)])


class GrowingIndex:
    """Index of a text that somebody else keeps, which grows. Forgets everything once in `MOST_TOKENS` tokens."""

    __slots__ = ("_places",)

    def __init__(self) -> None:
        self._places: tuple[dict[int, int], dict[int, int]] = ({}, {})

    def find_last(self, key: int, *, long: bool) -> int | None:
        """The place behind the last run with this key; None where there is none."""
        return self._places[long].get(key)

    def add(self, key: int, place: int, *, long: bool) -> None:
        """A run with this key ends before `place`."""
        places = self._places[long]
        if len(places) >= MOST_TOKENS:
            places.clear()
        places[key] = place
