"""What other gateways have sent where, as workers tell it.

A gateway names every prompt of some length to the worker that it sends it to (`names.HEADER_PROMPT`), and workers tell
all gateways the names of the prompts that they have begun (`WorkerTelemetry.prompts`). A name is the chain entry of the
prompt's last full chunk, that of the longest prefix in it which many share, and the prefill worker: enough to know
where a conversation is and who has a system prompt, and nothing of what was said. Workers repeat names and understand
nothing of them.
"""

from __future__ import annotations

from collections.abc import Iterable

from tandem_gateway.scheduling.endpoint import Endpoint
from tandem_gateway.scheduling.shared import Holders, Holding, merge
from tandem_gateway.scheduling.storing import Store

GENERATION = 1 << 15
"""Names remembered, and as many older ones: about 16 MB together."""
MAX_LOOKS = 256
"""Entries of one prompt that are looked up, the last ones: a turn adds less."""
_DIGITS = 16


def name_prompt(entry: int, shared: int, prefill: str) -> str:
    """The name of a prompt. `shared` is 0 where many share nothing of it, `prefill` empty where its decode worker
    computes it."""
    return f"{entry:016x}{shared:016x}{prefill}"


def parse_name(name: str) -> tuple[int, int, str] | None:
    """What `name_prompt` was given; None: it is the name of another kind of gateway."""
    try:
        return int(name[:_DIGITS], 16), int(name[_DIGITS : 2 * _DIGITS], 16), name[2 * _DIGITS :]
    except ValueError:
        return None


class Hearsay:
    """From the last entry of a prompt to who was sent it, in two generations as in the index."""

    __slots__ = ("_old", "_young")

    def __init__(self) -> None:
        self._young: dict[int, Holders] = {}
        self._old: dict[int, Holders] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def knows(self, entry: int, endpoint: Endpoint) -> bool:
        """Whether it has been added that this endpoint was sent this."""
        holders = self._young.get(entry)
        return holders is not None and any(one.endpoint is endpoint and one.alive() for one in holders)

    def add(self, entry: int, holdings: Iterable[Holding]) -> None:
        """These were sent a prompt that ends with this entry."""
        if len(self._young) >= GENERATION:
            self._old, self._young = self._young, {}
        holders = self._young.get(entry) or self._old.get(entry) or ()
        for holding in holdings:
            holders = merge(holders, (holding,), (holding.endpoint,))
        self._young[entry] = holders

    def match(
        self,
        chain: list[int],
        known: int,
        chunk_tokens: float,
        found: dict[Endpoint, int],
        stored: dict[Store, int],
        now: float,
    ) -> None:
        """Put who was sent most of this prompt into `found`, with the tokens, where that is more than `known` chunks,
        which this gateway has sent somewhere itself; and into `stored` the stores that have it then."""
        young, old = self._young, self._old
        if not young:
            return
        for depth in range(len(chain), max(known, len(chain) - MAX_LOOKS), -1):
            entry = chain[depth - 1]
            holders = young.get(entry) or old.get(entry)
            if not holders:
                continue
            tokens = int(depth * chunk_tokens)
            for holding in holders:
                if holding.store is not None and holding.is_settled(now) and stored.get(holding.store, 0) < tokens:
                    stored[holding.store] = tokens
            alive = [holding.endpoint for holding in holders if holding.alive()]
            for endpoint in alive:
                if found.get(endpoint, 0) < tokens:
                    found[endpoint] = tokens
            if alive:
                return
