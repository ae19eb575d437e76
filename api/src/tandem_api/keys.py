"""Keys that the pods of one model share: the operator makes them, a Secret carries them, pods read them from a folder.

Two rings, so that a gateway, which faces clients, cannot speak as a worker:

- `peers.json`: workers prove it to each other before a byte of KV or group traffic is taken.
- `api.json`: what a gateway shows a worker with every request, as `bearer_token` in `names.HEADER_TOKEN`.

Rotation has three steps, each of which has reached every pod before the next: the new key is added, made primary, the
old one removed. Whoever speaks first uses the primary key and names it; whoever listens accepts every key of the ring.
"""

from __future__ import annotations

import hmac
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

KEY_BYTES = 32
MAX_KEY_ID = 16
_KEY_ID = re.compile(r"[a-z0-9]{1,16}")
_RELOAD_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRing:
    """All keys that are good now, by id. `primary` is the one to speak with."""

    primary: str
    keys: Mapping[str, bytes] = field(repr=False)  # rings end up in messages, keys must not

    @property
    def authenticates(self) -> bool:
        """False of `OPEN_RING`."""
        return self is not OPEN_RING

    def encode(self) -> str:
        """The JSON that `parse_key_ring` reads."""
        return json.dumps({"primary": self.primary, "keys": {name: key.hex() for name, key in self.keys.items()}})


OPEN_RING = KeyRing(primary="none", keys={"none": b""})
"""Stands for no keys at all: whoever speaks the protocol is believed, and nobody with keys believes it."""


def parse_key_ring(text: str | bytes) -> KeyRing:
    """The ring that `KeyRing.encode` wrote. Raises ValueError with a sentence; no part of a key is in it."""
    try:
        fields: Any = json.loads(text)
        primary, entries = str(fields["primary"]), fields["keys"]
        keys = {str(name): bytes.fromhex(key) for name, key in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is not a key ring ({type(error).__name__})") from None
    for name, key in keys.items():
        if _KEY_ID.fullmatch(name) is None:
            raise ValueError("a key's id is not 1 to 16 lower-case letters and digits")
        if len(key) != KEY_BYTES:
            raise ValueError(f"key {name} has {len(key)} bytes instead of {KEY_BYTES}")
    if primary not in keys:
        raise ValueError("its primary key is not among its keys")
    return KeyRing(primary=primary, keys=keys)


def bearer_token(ring: KeyRing) -> str:
    """What to show in `names.HEADER_TOKEN`."""
    return f"{ring.primary}.{ring.keys[ring.primary].hex()}"


def admits(ring: KeyRing, token: str | None) -> bool:
    """Whether `token` is one of the ring's. In constant time for a given ring; everything is admitted without keys."""
    if not ring.authenticates:
        return True
    shown = (token or "").encode("utf-8", "surrogateescape")
    good = [hmac.compare_digest(f"{name}.{key.hex()}".encode(), shown) for name, key in ring.keys.items()]
    return any(good)


class KeyFile:
    """A ring in a file that changes under a running process, as a mounted Secret does. Any thread."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises OSError where the file cannot be read, ValueError where it holds no ring."""
        self._path, self._clock = path, clock
        self._lock = threading.Lock()
        self._text = path.read_bytes()
        self._ring = parse_key_ring(self._text)
        self._problem = ""
        self._next_look = clock() + _RELOAD_SECONDS

    def ring(self) -> KeyRing:
        """The ring of at most a second ago. A file that has become unreadable leaves the last good ring in force."""
        now = self._clock()
        if now >= self._next_look:
            with self._lock:
                if now >= self._next_look:
                    self._next_look = now + _RELOAD_SECONDS
                    self._reload()
        return self._ring

    def _reload(self) -> None:
        try:
            text = self._path.read_bytes()
            ring = self._ring if text == self._text else parse_key_ring(text)
        except (OSError, ValueError) as error:
            if self._problem != str(error):  # once, not every second
                self._problem = str(error)
                logger.warning(
                    "the keys in %s cannot be read again, the last good ones stay in force: %s", self._path, error
                )
            return
        self._problem = ""
        if ring is self._ring:
            return
        self._text, self._ring = text, ring
        logger.info("keys were read again", extra={"file": str(self._path), "primary": ring.primary})


def open_ring() -> KeyRing:
    """In place of `KeyFile.ring` where no keys are configured."""
    return OPEN_RING
