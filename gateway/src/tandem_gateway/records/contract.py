"""What is recorded of a request that went to a worker, or waited for one: an exchange as log and spans see it."""

from __future__ import annotations

from typing import Protocol

from tandem_gateway.http.request import Request
from tandem_gateway.requests.prompt import Inquiry


class RecordedExchange(Protocol):
    request: Request
    inquiry: Inquiry
    request_id: bytes
    started_at: float
    """Monotonic, as are all of its times."""
    first_byte_at: float
    """0 where the answer is no stream, or has not begun."""
    status: int
    """What the client was told."""
    error: str | None
    """Why it failed, in one word."""
    usage: dict[str, object] | None
    """As the answer said it, under the names of chats."""
    bytes_out: int
    attempts: int
    queue_seconds: float
    """Time that it waited for a worker."""

    @property
    def events(self) -> int: ...

    @property
    def resumes(self) -> int:
        """Times that another worker went on with its stream."""
        ...

    @property
    def converted(self) -> bool:
        """Its decode worker was to compute the prompt because prefill workers were behind."""
        ...

    @property
    def answered_status(self) -> int | None:
        """What the worker that was asked last has answered; None where it has not."""
        ...

    def worker_names(self) -> tuple[str | None, str | None]:
        """Decode and prefill worker."""
        ...
