"""Logprobs as the two OpenAI endpoints write them. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tandem_worker.control.params import TokenLogprob
from tandem_worker.server.detokenizer import TokenTable

FLOOR = -9999.0
"""Stands for minus infinity, which JSON cannot write; OpenAI uses the same figure."""


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else FLOOR


def _entry(table: TokenTable, token_id: int, logprob: float) -> dict[str, Any]:
    raw = table.token_bytes(token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(raw)}


def chat_entries(table: TokenTable, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """The array `choices[].logprobs.content`."""
    entries: list[dict[str, Any]] = []
    for logprob in logprobs:
        entry = _entry(table, logprob.token_id, logprob.logprob)
        entry["top_logprobs"] = [_entry(table, token_id, value) for token_id, value in logprob.top]
        entries.append(entry)
    return entries


def legacy_entries(
    table: TokenTable, logprobs: Sequence[TokenLogprob | None], token_ids: Sequence[int], offsets: Sequence[int]
) -> dict[str, list[Any]]:
    """The object `choices[].logprobs` of completions. None stands for a first prompt token, which has no logprob."""
    tokens = [_legacy_text(table, token_id) for token_id in token_ids]
    values = [None if logprob is None else finite(logprob.logprob) for logprob in logprobs]
    top = [None if logprob is None else _legacy_top(table, logprob) for logprob in logprobs]
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": list(offsets)}


def _legacy_top(table: TokenTable, logprob: TokenLogprob) -> dict[str, float]:
    top = {_legacy_text(table, token_id): finite(value) for token_id, value in logprob.top}
    # The sampled token is always listed, as OpenAI does.
    top.setdefault(_legacy_text(table, logprob.token_id), finite(logprob.logprob))
    return top


def _legacy_text(table: TokenTable, token_id: int) -> str:
    raw = table.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:  # part of a character: written so that different tokens stay different keys
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
