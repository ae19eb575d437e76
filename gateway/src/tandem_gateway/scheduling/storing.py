"""What workers share through a store, as far as a gateway knows it.

The workers of one build share a store: what any of them put there all of them load, whoever of them is still there. A
gateway is told by each at which rate it loads, for how many tokens it makes room, and how many it has computed, which
all go there. What the store has is reckoned: the prompts whose answers have ended, until it has taken in as many tokens
again as it has room for. A store forgets for other reasons too (a holder that leaves, a master that restarts, other
models that share it), so the share of such tokens that turn out to be there is learned, and counts in the price
(`pulling`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tandem_gateway.scheduling.endpoint import Endpoint

_NEWS = 0.1
"""Weight of one observation of what was there: about the last twenty prompts count."""


class Share(NamedTuple):
    """A worker's part in a store, as it tells."""

    rate: float
    """Tokens per second at which it loads; 0: not known yet."""
    room: int
    """Tokens for which it makes room; 0: it does not tell, and as many count as its cache holds."""
    computed: int = 0
    """Tokens that it has computed since its start."""


class Store:
    """What one build's workers share."""

    __slots__ = ("_parts", "answer_seconds", "found", "gone", "tokens", "written")

    def __init__(self) -> None:
        self.tokens = 0
        """For which there is room: of all its workers together."""
        self.written = 0
        """Tokens that it has taken in so far: what was written before the last `tokens` of them is given up."""
        self.found = 1.0
        """The share of the tokens that were believed to be there which lately were."""
        self.answer_seconds = 0.0
        """How long its requests lately took, of those that this gateway has sent: blocks come here when they end."""
        self.gone = False
        """All its workers have been without it at a time: what they find next is another one, or empty."""
        self._parts: dict[Endpoint, Share] = {}
        """Parts of those who use it, as told last."""

    def join(self, endpoint: Endpoint, share: Share) -> None:
        """It uses the store, and this is its part."""
        before = self._parts.get(endpoint, Share(0.0, 0, share.computed))
        self._parts[endpoint] = share
        self.tokens += share.room - before.room
        written = share.computed - before.computed
        self.written += written if written >= 0 else share.computed  # it has started again

    def find_rate(self, endpoint: Endpoint) -> float:
        """Tokens per second at which it loads; 0: not known yet."""
        part = self._parts.get(endpoint)
        return 0.0 if part is None else part.rate

    def leave(self, endpoint: Endpoint) -> None:
        """It uses it no longer, or is no more."""
        part = self._parts.pop(endpoint, None)
        self.tokens -= 0 if part is None else part.room
        self.gone = not self._parts

    def has(self, written: int) -> bool:
        """Whether what was put there when it had taken in so much is still there, as far as can be reckoned."""
        return not self.gone and self.written - written < self.tokens

    def learn_length(self, seconds: float) -> None:
        """A request took so long, of which nothing new came here before."""
        self.answer_seconds += _NEWS * (seconds - self.answer_seconds)

    def learn(self, share: float) -> None:
        """So much of what was believed to be there was."""
        self.found += _NEWS * (min(1.0, max(0.0, share)) - self.found)


class Stores:
    """Those of a model's builds, as far as workers use them now."""

    __slots__ = ("_stores",)

    def __init__(self) -> None:
        self._stores: dict[tuple[str, str], Store] = {}
        """Stores by revision and engine: blocks of two builds never meet."""

    def __len__(self) -> int:
        return len(self._stores)

    @property
    def tokens(self) -> int:
        """For which there is room in all of them."""
        return sum(store.tokens for store in self._stores.values())

    def apply(self, endpoint: Endpoint, share: Share | None) -> None:
        """A worker's part is now this; None: it uses none."""
        key = endpoint.worker.revision, endpoint.worker.engine
        store = endpoint.store
        if share is not None:
            if store is None:
                store = endpoint.store = self._stores.setdefault(key, Store())
            store.join(endpoint, share if share.room else share._replace(room=endpoint.kv_tokens))
        elif store is not None:
            endpoint.store = None
            store.leave(endpoint)
            if store.gone:
                del self._stores[key]
