"""What a choice has to say: the pieces that parsers make of its text, and the updates that encoders send. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tandem_worker.engine.schedule.params import TokenLogprob

Finish = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class ToolDelta:
    """Part of a tool call. The first one of a call has `name` and `id`, which its parser leaves to the choice where the
    model has written none; `arguments` are to be joined."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(slots=True)
class Parsed:
    """New output of a parser."""

    content: str = ""
    reasoning: str = ""
    tools: list[ToolDelta] = field(default_factory=list)

    def add(self, other: Parsed) -> None:
        """Write what `other` has behind what is here."""
        self.content += other.content
        self.reasoning += other.reasoning
        self.tools += other.tools


class TextParser(Protocol):
    """Splits the text of one choice into content, reasoning and tool calls.

    Invariant: what has been returned after the same text is the same, however the text was cut into calls of `feed`.
    """

    def feed(self, text: str) -> Parsed:
        """What this text adds; what may still turn out to be a mark is withheld."""
        ...

    def flush(self) -> Parsed:
        """The text ended: what was withheld."""
        ...

    @property
    def reasoning(self) -> bool:
        """The text so far ends inside reasoning."""
        ...

    @property
    def complete(self) -> bool:
        """Nothing that may follow is wanted (one tool call was allowed and is there)."""
        ...


@dataclass(slots=True)
class Update:
    """What is new in a choice since its last update."""

    content: str = ""
    reasoning: str = ""
    tools: list[ToolDelta] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    logprob_offsets: list[int] = field(default_factory=list)
    """Offsets in the text of the choice at which each of `logprobs` begins."""
    token_ids: list[int] = field(default_factory=list)
    """Without `end_token`."""
    finish: Finish | None = None
    stopped_by: str | int | None = None
    """With `finish`: the stop string or the stop token of the request that ended the choice."""
    end_token: int | None = None
    """With `finish`: the token that the model ended the choice with, one of the request's or of its own."""

    @property
    def all_token_ids(self) -> list[int]:
        """As the model wrote them, the one that ended the choice among them."""
        return self.token_ids if self.end_token is None else [*self.token_ids, self.end_token]

    @property
    def has_text(self) -> bool:
        """Whether there is content, reasoning or part of a tool call."""
        return bool(self.content or self.reasoning or self.tools)


def split_tools(deltas: Sequence[ToolDelta]) -> tuple[Sequence[ToolDelta], Sequence[ToolDelta]]:
    """The rest of a call that began in an earlier update, which was written before any text of this one; and the calls
    that begin in this one."""
    begun = next((index for index, delta in enumerate(deltas) if delta.name is not None), len(deltas))
    return deltas[:begun], deltas[begun:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    """Tokens of the client's prediction that the answer has not said."""

    def to_json(self) -> dict[str, object]:
        """The `usage` object of OpenAI's API; what Tandem does not do (audio) counts 0."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens, "audio_tokens": 0},
            "completion_tokens_details": {
                "reasoning_tokens": self.reasoning_tokens,
                "audio_tokens": 0,
                "accepted_prediction_tokens": self.accepted_prediction_tokens,
                "rejected_prediction_tokens": self.rejected_prediction_tokens,
            },
        }


def derive_id(prefix: str, answer_id: str, part: str, *, size: int) -> str:
    """Id of a part of an answer: `prefix`, and `size` bytes in hexadecimal. As hard to guess as the id of the answer.

    Equal for equal arguments: whoever goes on with an answer elsewhere gives its parts the same ids.
    """
    return prefix + hashlib.blake2b(f"{answer_id} {part}".encode(), digest_size=size).hexdigest()
