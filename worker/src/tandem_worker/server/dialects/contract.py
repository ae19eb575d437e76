"""What writes an answer, in whatever API it was asked for: the journal and the answerer know no more of an API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tandem_worker.engine.schedule.params import TokenLogprob
from tandem_worker.server.text.output import Update, Usage
from tandem_worker.server.wire.pacing import Steps


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What every event and response of a request repeats."""

    id: str
    created: int
    model: str
    fingerprint: str
    service_tier: str | None
    include_usage: bool
    return_token_ids: bool
    tokens_as_ids: bool
    with_logprobs: bool

    def fields(self, kind: str) -> dict[str, Any]:
        """The members that every object of this answer begins with."""
        fields: dict[str, Any] = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }
        return fields if self.service_tier is None else {**fields, "service_tier": self.service_tier}


class Encoder(Protocol):
    done: bytes
    """What a stream ends with after its last event."""
    has_state: bool
    """What it writes depends on what it has written: who goes on with a stream has to write all of it again. There is
    one choice then."""

    @property
    def repeated_logprobs(self) -> Sequence[TokenLogprob] | None:
        """For one that has a state: those in what it wrote last which may be written again; None where there are others
        too."""
        ...

    @property
    def head(self) -> AnswerHead:
        """What all events and the whole answer of a request begin with."""
        ...

    def tell_usage(self, usage: Usage) -> None:
        """Events from now on say that this is the usage so far."""
        ...

    def opening(self, index: int, prompt_token_ids: Sequence[int]) -> Steps[bytes]:
        """The event that comes first for a choice; may be empty."""
        ...

    def update(self, index: int, update: Update) -> bytes:
        """Events for what is new in a choice; empty when there is nothing to tell. For few tokens."""
        ...

    def long_update(self, index: int, update: Update) -> Steps[bytes]:
        """As `update`, for any number of tokens."""
        ...

    def usage(self, usage: Usage) -> bytes:
        """The event that tells a stream's usage, after every choice has ended."""
        ...

    def failure(self, body: Mapping[str, Any]) -> bytes:
        """The event that ends a stream which broke off; `body` is the error as OpenAI writes it."""
        ...

    def response(self, choices: Sequence[Update], prompts: Sequence[Sequence[int]], usage: Usage) -> Steps[list[bytes]]:
        """The whole answer, in parts; `choices[i]` is everything choice i said, `prompts[i]` its prompt tokens."""
        ...
