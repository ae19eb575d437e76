"""What one peer, and all of them together, may make a prefill worker keep. Pure but for a lock.

Peers have proven the model's key; these are bounds for one with a defect, far above what a sound one needs.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from tandem_worker.transfer.errors import QuotaError

_FEW_TOKENS = 1 << 17
"""As an order so many take some 5 MB: not worth a refusal, however small the block space is."""


class Quota(StrEnum):
    """A label of metrics."""

    SESSIONS = "sessions"
    ORDERS = "orders"
    TOKENS = "tokens"
    ATTACHMENTS = "attachments"
    RESENDS = "resends"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    sessions: int = 1024
    """Connections at a time."""
    sessions_per_host: int = 64
    """From one address: a decode pod opens one per rank, and several pods may share a node's address."""
    orders: int = 4096
    """From order to release."""
    orders_per_session: int = 1024
    tokens: int
    """Tokens of prompts that are ordered and not released: a longer queue is not worth waiting in."""
    tokens_per_session: int
    attachments: int = 4096
    """To orders of other ranks, from ATTACH to release."""
    attachments_per_session: int = 1024

    @classmethod
    def of(cls, num_slots: int) -> Quotas:
        """For a block space of so many tokens."""
        return cls(tokens=max(4 * num_slots, 2 * _FEW_TOKENS), tokens_per_session=max(2 * num_slots, _FEW_TOKENS))


class Ledger:
    """What is kept for whom. Any thread."""

    def __init__(self, quotas: Quotas) -> None:
        self.quotas = quotas
        self._lock = threading.Lock()
        self._hosts: Counter[str] = Counter()
        self._orders = self._tokens = self._attachments = 0
        self._refusals: Counter[Quota] = Counter()

    def open(self, host: str) -> Account:
        """For a new connection from `host`. Raises QuotaError."""
        with self._lock:
            if self._hosts.total() >= self.quotas.sessions:
                raise self._refuse(Quota.SESSIONS, f"there are {self.quotas.sessions} connections already")
            if self._hosts[host] >= self.quotas.sessions_per_host:
                raise self._refuse(Quota.SESSIONS, f"{host} has {self.quotas.sessions_per_host} connections already")
            self._hosts[host] += 1
        return Account(self, host)

    def refuse(self, quota: Quota, message: str) -> QuotaError:
        """The error to raise; counted."""
        with self._lock:
            return self._refuse(quota, message)

    @property
    def refusals(self) -> dict[str, int]:
        """By quota, since the start."""
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

    def remove(self, account: Account, orders: int, tokens: int, attachments: int) -> None:
        with self._lock:
            self._note(account, -orders, -tokens, -attachments)

    def close(self, account: Account) -> None:
        """The connection has ended."""
        with self._lock:
            self._note(account, -account.orders, -account.tokens, -account.attachments)
            self._hosts[account.host] -= 1
            self._hosts += Counter[str]()  # forgets hosts without a connection

    def _note(self, account: Account, orders: int, tokens: int, attachments: int) -> None:
        account.orders += orders
        account.tokens += tokens
        account.attachments += attachments
        self._orders += orders
        self._tokens += tokens
        self._attachments += attachments


class Account:
    """What one connection has taken of the quotas."""

    def __init__(self, ledger: Ledger, host: str) -> None:
        self.ledger, self.host = ledger, host
        self.orders = self.tokens = self.attachments = 0

    def take_order(self, num_tokens: int) -> None:
        """Raises QuotaError."""
        self.ledger.add(self, 1, num_tokens, 0)

    def return_order(self, num_tokens: int) -> None:
        self.ledger.remove(self, 1, num_tokens, 0)

    def take_attachment(self) -> None:
        """Raises QuotaError."""
        self.ledger.add(self, 0, 0, 1)

    def return_attachment(self) -> None:
        self.ledger.remove(self, 0, 0, 1)

    def close(self) -> None:
        self.ledger.close(self)
