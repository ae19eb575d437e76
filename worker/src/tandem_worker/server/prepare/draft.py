"""What a request becomes on its way to tokens: a draft with texts to tokenize, then a prepared request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem_worker.server.dialects.openai.chat_request import ChatRequest
from tandem_worker.server.dialects.openai.completion_request import CompletionRequest, Prompt
from tandem_worker.server.dialects.openai.pooling_requests import EmbeddingRequest, ScoreRequest

Tokens = Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedChat:
    request: ChatRequest
    tokens: Tokens
    room: int
    """Tokens that the answer may have."""
    ignored: Sequence[str]
    """Options that were left out of account."""
    prompt_end: str
    """The end of the rendered conversation: the header of the message that the answer continues, or more."""
    echo: bytes = b"{}"
    """Fields that answers of another shape repeat, as a JSON object."""
    prediction: Tokens = ()
    """What the client expects the answer to be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedCompletion:
    request: CompletionRequest
    tokens: Sequence[Tokens]
    room: Sequence[int]
    ignored: Sequence[str]
    prediction: Tokens = ()
    """What the client expects each answer to be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedEmbedding:
    request: EmbeddingRequest
    tokens: Sequence[Tokens]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedScore:
    request: ScoreRequest
    tokens: Sequence[Tokens]
    """Tokens of the queries, then of the documents."""


Prepared = PreparedChat | PreparedCompletion | PreparedEmbedding | PreparedScore | bytes
"""Bytes are an answer in JSON, ready to be sent."""


@dataclass(frozen=True, slots=True)
class Text:
    """To be tokenized. `check` is told how many tokens it has, and before that how many it has at least."""

    text: str
    add_special_tokens: bool
    check: Callable[[int, bool], object]


@dataclass(frozen=True, slots=True)
class Draft:
    """A request that is read; what is left to do is to tokenize its texts and to put it together."""

    texts: Sequence[Text]
    finish: Callable[[Sequence[Tokens]], Prepared]
    """Takes the tokens of `texts`."""

    @property
    def num_characters(self) -> int:
        """Characters of all texts that are still to be tokenized."""
        return sum(len(each.text) for each in self.texts)


def cut_count(num_tokens: int, most: int | None) -> int:
    """How many are left of so many tokens when `most` are taken; None: all are."""
    return num_tokens if most is None else min(num_tokens, most)


def cut_front(tokens: Tokens, most: int | None) -> Tokens:
    """The last `most` tokens; None: all."""
    return tokens if most is None or len(tokens) <= most else tokens[-most:]


def fill_in(prompts: Sequence[Prompt], encoded: Sequence[Tokens]) -> list[Tokens]:
    """The tokens of all prompts: those that came as token ids, and those of texts."""
    rest = iter(encoded)
    return [next(rest) if isinstance(prompt, str) else prompt for prompt in prompts]
