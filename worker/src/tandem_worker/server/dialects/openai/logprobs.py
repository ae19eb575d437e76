"""Logprobs as the two OpenAI endpoints write them. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from tandem_worker.engine.schedule.params import TokenLogprob
from tandem_worker.server.wire.pacing import Steps


class TokenNames(Protocol):
    """How tokens are written: as their bytes, or otherwise."""

    def token_bytes(self, token_id: int) -> bytes:
        """What stands for a token of this id."""
        ...


FLOOR = -9999.0
"""Stands for minus infinity, which JSON cannot write; OpenAI uses the same figure."""


SLICE_TOKENS = 32
"""With 20 alternatives each they take two milliseconds to write."""


def finite(logprob: float) -> float:
    """The natural logarithm as JSON can write it: FLOOR stands for infinities and NaN."""
    return logprob if math.isfinite(logprob) else FLOOR


def _entry(names: TokenNames, token_id: int, logprob: float) -> dict[str, Any]:
    raw = names.token_bytes(token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(raw)}


def chat_logprobs(names: TokenNames, logprobs: Sequence[TokenLogprob]) -> Steps[orjson.Fragment]:
    """The object `choices[].logprobs` of chat completions."""
    return orjson.Fragment(b'{"content":[%b],"refusal":null}' % (yield from chat_entries(names, logprobs)))


def chat_entries(names: TokenNames, logprobs: Sequence[TokenLogprob]) -> Steps[bytes]:
    """Its entries, with commas between them."""
    parts: list[bytes] = []
    for start in range(0, len(logprobs), SLICE_TOKENS):
        if start:
            yield
        entries = [_chat_entry(names, logprob) for logprob in logprobs[start : start + SLICE_TOKENS]]
        parts.append(orjson.dumps(entries)[1:-1])
    return b",".join(parts)


def _chat_entry(names: TokenNames, logprob: TokenLogprob) -> dict[str, Any]:
    entry = _entry(names, logprob.token_id, logprob.logprob)
    entry["top_logprobs"] = [_entry(names, token_id, value) for token_id, value in logprob.top]
    return entry


def legacy_logprobs(
    names: TokenNames,
    logprobs: Sequence[TokenLogprob | None],
    token_ids: Sequence[int],
    offsets: Sequence[int],
    num_top: int | None = None,
) -> Steps[orjson.Fragment]:
    """The object `choices[].logprobs` of completions. None stands for a first prompt token, which has no logprob.

    `num_top`: so many of the likeliest tokens that are known; None: all.
    """
    top: list[bytes] = []
    for start in range(0, len(logprobs), SLICE_TOKENS):
        if start:
            yield
        part = logprobs[start : start + SLICE_TOKENS]
        top.append(orjson.dumps([None if each is None else _legacy_top(names, each, num_top) for each in part])[1:-1])
    tokens = [_legacy_text(names, token_id) for token_id in token_ids]
    values = [None if logprob is None else finite(logprob.logprob) for logprob in logprobs]
    fields = {"tokens": tokens, "token_logprobs": values, "top_logprobs": orjson.Fragment(b"[%b]" % b",".join(top))}
    return orjson.Fragment(orjson.dumps({**fields, "text_offset": list(offsets)}))


@dataclass(slots=True, kw_only=True)
class PromptScores:
    """The logprobs of one prompt's tokens; all choices of the prompt repeat them."""

    logprobs: Sequence[TokenLogprob | None]
    """None stands for the first token, before which there is nothing."""
    num_top: int
    """Likeliest tokens that are told for each; the prompt's own token is always told."""
    written: orjson.Fragment | None = None

    def write(self, names: TokenNames) -> Steps[orjson.Fragment]:
        """The array `prompt_logprobs` as vLLM writes it: for each token null, or an object by token id."""
        if self.written is None:
            parts: list[bytes] = []
            for start in range(0, len(self.logprobs), SLICE_TOKENS):
                if start:
                    yield
                part = self.logprobs[start : start + SLICE_TOKENS]
                parts.append(orjson.dumps([each and _prompt_entry(names, each, self.num_top) for each in part])[1:-1])
            self.written = orjson.Fragment(b"[%b]" % b",".join(parts))
        return self.written


def _prompt_entry(names: TokenNames, logprob: TokenLogprob, num_top: int) -> dict[str, Any]:
    told = {logprob.token_id: (logprob.logprob, logprob.rank)}
    for rank, (token_id, value) in enumerate(logprob.top[:num_top], 1):
        told.setdefault(token_id, (value, rank))
    return {
        str(token_id): {
            "logprob": finite(value),
            "rank": rank,
            "decoded_token": names.token_bytes(token_id).decode("utf-8", "replace"),
        }
        for token_id, (value, rank) in told.items()
    }


def _legacy_top(names: TokenNames, logprob: TokenLogprob, num_top: int | None) -> dict[str, float]:
    """The sampled token is always listed, as OpenAI does, and first, as clients of vLLM read it."""
    sampled = {_legacy_text(names, logprob.token_id): finite(logprob.logprob)}
    return sampled | {_legacy_text(names, token_id): finite(value) for token_id, value in logprob.top[:num_top]}


def _legacy_text(names: TokenNames, token_id: int) -> str:
    raw = names.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:  # part of a character: written so that different tokens stay different keys
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
