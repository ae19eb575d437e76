"""What one peer, and all of them together, may make a prefill worker keep. Pure but for a lock.

Peers have proven the model's key; these are bounds for one with a defect, far above what a sound one needs.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from tandem_worker.transfer.errors import QuotaError

_FEW_TOKENS = 1 << 17
"""As an order so many take some 5 MB: not worth a refusal, however small the block space is."""
NAMES_PER_HOST = 8
"""Pods that may share an address at no cost. Of more, each counts as one of so many that have ordered all of it."""
URGENT_SECONDS = 30.0
"""In this time as many tokens as the block space holds may get ahead of others by their priority."""
FETCHED_SECONDS = 4.0
FIRST_FRAMES = 64
_BYTES_PER_FRAME = 4096


class Quota(StrEnum):
    """A label of metrics."""

    SESSIONS = "sessions"
    ORDERS = "orders"
    TOKENS = "tokens"
    ATTACHMENTS = "attachments"
    RESENDS = "resends"
    FETCHES = "fetches"
    FETCHED = "fetched"
    """Tokens of blocks that were asked for by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    sessions: int = 1024
    """Connections at a time."""
    sessions_per_host: int = 64
    """From one address, of peers that have not said with a proof of the key who they are: all of them, without keys."""
    sessions_per_worker: int = 64
    """Connections of one pod that has: it opens one per rank. Where its packets come from does not matter then: many
    pods may share an address."""
    orders: int = 4096
    """From order to release."""
    orders_per_session: int = 1024
    tokens: int
    """Tokens of prompts that are ordered and not released: a longer queue is not worth waiting in."""
    tokens_per_session: int
    fair_tokens: int
    """Ordered and not released, they make a pod's next order wait one level of priority longer: see `demotion`."""
    attachments: int = 4096
    """To orders of other ranks, from ATTACH to release."""
    attachments_per_session: int = 1024
    fetches: int = 32
    """Fetches of blocks by name at a time: each has a buffer. What is refused is computed where it is wanted."""
    fetches_per_session: int = 4
    fetched_tokens: int = _FEW_TOKENS
    """Tokens of blocks that one pod may ask for at once after silence, and again in every `FETCHED_SECONDS`."""
    frames_per_second: float = 2000.0
    """Frames of one pod (without keys: of one address), all its connections together; a frame counts again for every 4
    KiB. An order takes two frames, a thousand tokens of it another. Who sends more is not read from for a while."""
    frames_at_once: int = 4096
    """After silence. A pod that has just connected may send `FIRST_FRAMES`, so that coming again gains nothing."""

    @classmethod
    def of(cls, num_slots: int) -> Quotas:
        """For a block space of so many tokens."""
        return cls(
            tokens=max(4 * num_slots, 2 * _FEW_TOKENS),
            tokens_per_session=max(2 * num_slots, _FEW_TOKENS),
            fair_tokens=num_slots,
            fetched_tokens=max(num_slots, _FEW_TOKENS),
        )


class Bucket:
    """Tokens that come at `rate` a second, up to `most`. Who takes more than there are waits for them to come."""

    __slots__ = ("_at", "_left", "_most", "_rate")

    def __init__(self, rate: float, most: float, left: float, now: float) -> None:
        self._rate, self._most, self._left, self._at = rate, most, left, now

    def take(self, count: float, now: float) -> float:
        """Seconds to wait until they are there."""
        self._fill(now)
        self._left -= count
        return max(0.0, -self._left / self._rate)

    def try_take(self, count: float, now: float) -> bool:
        """Take them if they are there now; of more than ever fit, when it is full."""
        self._fill(now)
        if self._left < min(count, self._most):
            return False
        self._left -= count
        return True

    def is_full(self, now: float) -> bool:
        """Whether a new one would be no different."""
        self._fill(now)
        return self._left >= self._most

    def _fill(self, now: float) -> None:
        self._left = min(self._most, self._left + (now - self._at) * self._rate)
        self._at = now


class Ledger:
    """What is kept for whom. Any thread."""

    def __init__(self, quotas: Quotas, clock: Callable[[], float] = time.monotonic) -> None:
        self.quotas = quotas
        self._clock = clock
        self._lock = threading.Lock()
        self._owners: Counter[tuple[str, str]] = Counter()
        self._tokens_of: Counter[tuple[str, str]] = Counter()
        self._tokens_at: Counter[str] = Counter()
        """Tokens by address, whatever names are used there."""
        self._names_at: dict[str, Counter[str]] = {}
        """Connections by address and by the name of the pod."""
        self._urgent = Bucket(quotas.fair_tokens / URGENT_SECONDS, quotas.fair_tokens, quotas.fair_tokens, clock())
        self._buckets: dict[tuple[str, str], Bucket] = {}
        """Buckets of every owner of connections."""
        self._fetched: dict[tuple[str, str], Bucket] = {}
        """What each may ask for by name. Of one that has gone it is kept until it is all there again, so that coming
        again gains nothing."""
        self._fetches = 0
        self._orders = self._tokens = self._attachments = 0
        self._refusals: Counter[Quota] = Counter()

    def open(self, host: str, *, proven: bool = False) -> Account:
        """For a new connection from `host`. `proven`: the peer has the model's key. Raises QuotaError."""
        with self._lock:
            if self._owners.total() >= self.quotas.sessions:
                raise self._refuse(Quota.SESSIONS, f"there are {self.quotas.sessions} connections already")
            owner = ("", host)
            self._add_owner(owner, self.quotas.sessions_per_host)
        return Account(self, owner, host, proven=proven)

    def identify(self, account: Account, worker: str) -> None:
        """The connection is that of `worker`, and counts as its own from now on. Raises QuotaError.

        Where no key was proven everybody may give any name: the address goes on to count.
        """
        if not account.proven:
            return
        with self._lock:
            owner = ("worker ", worker)
            self._add_owner(owner, self.quotas.sessions_per_worker)
            self._drop_owner(account.owner)
            account.owner, account.name = owner, worker
            self._names_at.setdefault(account.host, Counter())[worker] += 1

    def _add_owner(self, owner: tuple[str, str], most: int) -> None:
        if self._owners[owner] >= most:
            raise self._refuse(Quota.SESSIONS, f"{''.join(owner)} has {most} connections already")
        self._owners[owner] += 1
        if owner not in self._buckets:
            quotas = self.quotas
            first = min(FIRST_FRAMES, quotas.frames_at_once)
            self._buckets[owner] = Bucket(quotas.frames_per_second, quotas.frames_at_once, first, self._clock())
        if owner not in self._fetched:
            most = self.quotas.fetched_tokens
            self._fetched[owner] = Bucket(most / FETCHED_SECONDS, most, most, self._clock())

    def _drop_owner(self, owner: tuple[str, str]) -> None:
        self._owners[owner] -= 1
        if not self._owners[owner]:
            del self._owners[owner], self._buckets[owner]
            self._tokens_of.pop(owner, None)
            now = self._clock()
            for gone in [one for one, left in self._fetched.items() if one not in self._owners and left.is_full(now)]:
                del self._fetched[gone]

    def demotion(self, account: Account) -> float:
        """What to add to the priority of a pod's next order, because of those that it has given already.

        About what it would wait behind them alone. So pods with little under way do not wait behind all that one has
        ordered, and the order among those of one pod stays. A pod that gives itself many names gains little.
        """
        with self._lock:
            tokens = self._tokens_of[account.owner]
            if len(self._names_at.get(account.host, ())) > NAMES_PER_HOST:
                tokens = max(tokens, self._tokens_at[account.host] / NAMES_PER_HOST)
            return tokens / self.quotas.fair_tokens

    def place(self, account: Account, priority: float, num_tokens: int) -> float:
        """The priority at which an order is served.

        What gets ahead of others is bounded, for all peers together, so that nobody waits for ever behind what a peer
        claims to be urgent: beyond it an order is as urgent as any other.
        """
        later = self.demotion(account)
        if priority < 0:
            with self._lock:
                if not self._urgent.try_take(num_tokens, self._clock()):
                    priority = 0
        return priority + later

    def count_frame(self, account: Account, num_bytes: int) -> float:
        """Seconds for which its sender is to be left alone."""
        with self._lock:
            return self._buckets[account.owner].take(1 + num_bytes / _BYTES_PER_FRAME, self._clock())

    def refuse(self, quota: Quota, message: str) -> QuotaError:
        """The error to raise; counted."""
        with self._lock:
            return self._refuse(quota, message)

    @property
    def refusals(self) -> dict[str, int]:
        """Counts by quota, since the start."""
        with self._lock:
            return {quota.value: self._refusals[quota] for quota in Quota}

    def _refuse(self, quota: Quota, message: str) -> QuotaError:
        self._refusals[quota] += 1
        return QuotaError(message)

    def add(self, account: Account, orders: int, tokens: int, attachments: int) -> None:
        """Raises QuotaError, and nothing is noted then."""
        limits = self.quotas
        with self._lock:
            for quota, mine, most, everyone, most_of_all in (
                (Quota.ORDERS, account.orders + orders, limits.orders_per_session, self._orders + orders,
                 limits.orders),
                (Quota.TOKENS, account.tokens + tokens, limits.tokens_per_session, self._tokens + tokens,
                 limits.tokens),
                (Quota.ATTACHMENTS, account.attachments + attachments, limits.attachments_per_session,
                 self._attachments + attachments, limits.attachments),
            ):  # fmt: skip
                if mine > most:
                    raise self._refuse(quota, f"this connection would have {mine} {quota} open, {most} are allowed")
                if everyone > most_of_all:
                    raise self._refuse(quota, f"{everyone} {quota} would be open here, {most_of_all} are allowed")
            self._note(account, orders, tokens, attachments)

    def add_fetch(self, account: Account, num_tokens: int) -> None:
        """Raises QuotaError, and nothing is noted then. One that is larger than what a pod may ask for at once is taken
        where that pod has asked for nothing lately."""
        limits = self.quotas
        with self._lock:
            if account.fetches >= limits.fetches_per_session:
                raise self._refuse(Quota.FETCHES, f"this connection has {account.fetches} fetches open already")
            if self._fetches >= limits.fetches:
                raise self._refuse(Quota.FETCHES, f"{self._fetches} fetches are open here already")
            if not self._fetched[account.owner].try_take(num_tokens, self._clock()):
                raise self._refuse(Quota.FETCHED, "this worker has asked for too many blocks of late")
            account.fetches += 1
            self._fetches += 1

    def remove_fetch(self, account: Account) -> None:
        """It has ended."""
        with self._lock:
            account.fetches -= 1
            self._fetches -= 1

    def remove(self, account: Account, orders: int, tokens: int, attachments: int) -> None:
        """Give back what `add` took for this connection."""
        with self._lock:
            self._note(account, -orders, -tokens, -attachments)

    def close(self, account: Account) -> None:
        """The connection has ended."""
        with self._lock:
            self._note(account, -account.orders, -account.tokens, -account.attachments)
            self._fetches -= account.fetches
            account.fetches = 0
            self._drop_owner(account.owner)
            if account.name is not None:
                names = self._names_at[account.host]
                names[account.name] -= 1
                if not names[account.name]:
                    del names[account.name]
                if not names:
                    del self._names_at[account.host]

    def _note(self, account: Account, orders: int, tokens: int, attachments: int) -> None:
        account.orders += orders
        account.tokens += tokens
        self._tokens_of[account.owner] += tokens
        self._tokens_at[account.host] += tokens
        if not self._tokens_at[account.host]:
            del self._tokens_at[account.host]
        account.attachments += attachments
        self._orders += orders
        self._tokens += tokens
        self._attachments += attachments


class Account:
    """What one connection has taken of the quotas."""

    def __init__(self, ledger: Ledger, owner: tuple[str, str], host: str, *, proven: bool) -> None:
        self.ledger, self.owner, self.host, self.proven = ledger, owner, host, proven
        self.name: str | None = None
        """The name of its pod, where that was proven."""
        self.orders = self.tokens = self.attachments = self.fetches = 0

    def identify(self, worker: str) -> None:
        """Raises QuotaError."""
        self.ledger.identify(self, worker)

    def count_frame(self, num_bytes: int) -> float:
        """Seconds for which the peer is to be left alone."""
        return self.ledger.count_frame(self, num_bytes)

    def place(self, priority: float, num_tokens: int) -> float:
        """The priority at which an order is served, which is not among those in the account yet."""
        return self.ledger.place(self, priority, num_tokens)

    def take_order(self, num_tokens: int) -> None:
        """Raises QuotaError."""
        self.ledger.add(self, 1, num_tokens, 0)

    def return_order(self, num_tokens: int) -> None:
        """Give back an order of `num_tokens` that `take_order` took."""
        self.ledger.remove(self, 1, num_tokens, 0)

    def take_attachment(self) -> None:
        """Raises QuotaError."""
        self.ledger.add(self, 0, 0, 1)

    def return_attachment(self) -> None:
        """Give back what `take_attachment` took."""
        self.ledger.remove(self, 0, 0, 1)

    def take_fetch(self, num_tokens: int) -> None:
        """Raises QuotaError."""
        self.ledger.add_fetch(self, num_tokens)

    def return_fetch(self) -> None:
        """Give back what `take_fetch` took."""
        self.ledger.remove_fetch(self)

    def close(self) -> None:
        """The connection has ended: give back everything that it still holds."""
        self.ledger.close(self)
