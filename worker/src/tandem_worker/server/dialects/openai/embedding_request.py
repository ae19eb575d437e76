"""An embeddings request: the body, checked and typed. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tandem_worker.server.dialects.fields import Fields
from tandem_worker.server.dialects.openai.completion_request import Prompt, parse_prompts
from tandem_worker.server.dialects.openai.options import take_metadata, take_truncation

MAX_INPUTS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest:
    model: str | None
    """None: whichever is served."""
    inputs: tuple[Prompt, ...]
    encoding: Literal["float", "base64"]
    dimensions: int | None
    cache_salt: str
    priority: int
    truncate_prompt: int | None = None
    """The last so many tokens of each input are taken; -1: as many as fit."""


def parse_embedding(body: object, vocab_size: int, size: int) -> EmbeddingRequest:
    """`size` is the length of the model's vectors. Raises RequestError."""
    fields = Fields(body)
    take_metadata(fields)
    request = EmbeddingRequest(
        model=fields.string("model"),
        inputs=parse_prompts(fields.required("input"), vocab_size, name="input", limit=MAX_INPUTS),
        encoding="base64" if fields.choice("encoding_format", ("float", "base64")) == "base64" else "float",
        dimensions=fields.integer("dimensions", minimum=1, maximum=size),
        cache_salt=fields.string("cache_salt", max_length=256) or "",
        priority=fields.integer("priority", minimum=-1000, maximum=1000) or 0,
        truncate_prompt=take_truncation(fields),
    )
    fields.finish()
    return request
