"""What the gateway knows of one worker, and the tokens it has promised to it.

Invariant: an endpoint's counters are the sums over its open reservations, so they return to zero when the last request
ends, however it ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from tandem_api.names import Role

BACKOFF_FIRST = 0.5
BACKOFF_MAX = 3.0
"""Seconds. Short, because a model with one replica has nobody else to ask while its pod restarts in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One worker as discovery reports it. Equal workers are the same worker; a restarted pod keeps its name."""

    name: str
    address: str
    """`host:port` of its HTTP API; an IPv6 host stands in brackets."""
    role: Role
    revision: str
    kv_address: str = ""
    """`host:port` that decode workers ask for prefills; empty: its HTTP address."""


_serials = count(1)


class Endpoint:
    """A worker with its load and health as seen from this gateway."""

    __slots__ = (
        "affinity_seed", "backoff_until", "decode_tokens", "failures", "gone", "host", "prefill_address",
        "prefill_tokens", "requests", "serial", "worker",
    )  # fmt: skip

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.serial = next(_serials)
        """Names this incarnation: a worker that left and came back has an empty cache."""
        self.affinity_seed = worker.name.encode()
        self.host = worker.address.encode()
        self.prefill_address = (worker.kv_address or worker.address).encode()
        self.requests = 0
        self.prefill_tokens = 0
        """Uncached prompt tokens sent here and not yet computed."""
        self.decode_tokens = 0
        """Output tokens expected from here and not yet seen."""
        self.failures = 0
        self.backoff_until = 0.0
        self.gone = False
        """Discovery no longer reports it. Its requests may still finish."""

    def fail(self, now: float) -> None:
        """Take it out for a short while that doubles with every failure in a row."""
        self.backoff_until = now + min(BACKOFF_MAX, BACKOFF_FIRST * 2**self.failures)
        self.failures = min(self.failures + 1, 8)

    def succeed(self) -> None:
        self.failures = 0
        self.backoff_until = 0.0


class Reservation:
    """The tokens one request holds on its prefill and decode endpoint. Every method is safe to call again."""

    __slots__ = ("_decode", "_decode_left", "_open", "_prefill", "_prefill_left", "_prefilling")

    def __init__(self, decode: Endpoint, prefill: Endpoint, *, prefill_tokens: int, decode_tokens: int) -> None:
        """`prefill` is `decode` itself where that worker computes the prompt."""
        self._decode = decode
        self._prefill = prefill
        self._prefill_left = prefill_tokens
        self._decode_left = decode_tokens
        self._open = True
        self._prefilling = True
        decode.requests += 1
        decode.decode_tokens += decode_tokens
        prefill.prefill_tokens += prefill_tokens
        if prefill is not decode:
            prefill.requests += 1

    def first_token(self) -> None:
        """The prompt is computed: its prefill tokens are worked off."""
        if self._prefilling:
            self._prefilling = False
            self._prefill.prefill_tokens -= self._prefill_left
            if self._prefill is not self._decode:
                self._prefill.requests -= 1

    def progress(self, tokens: int) -> None:
        """`tokens` more were generated. One stays expected until the end: the request still occupies the worker."""
        done = min(tokens, self._decode_left - 1)
        if done > 0:
            self._decode_left -= done
            self._decode.decode_tokens -= done

    def release(self) -> None:
        """The request ended, whichever way."""
        if not self._open:
            return
        self._open = False
        self.first_token()
        self._decode.decode_tokens -= self._decode_left
        self._decode_left = 0
        self._decode.requests -= 1
