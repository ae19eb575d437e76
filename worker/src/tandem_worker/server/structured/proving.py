"""Runs in a process of its own: shows that a grammar compiles within limits, before the worker compiles it.

The worker must compile it again, because compiled grammars cannot leave their process. Compiling is deterministic, so
with the same parser limits it takes the same time, memory and stack there. Imports llguidance alone.
"""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Callable, Mapping

import orjson
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

REHEARSED_TOKENS = 4
"""A grammar that is too complex from the start is refused before an answer begins."""

_SMALL = 'start: %json {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}'


def parser_limits() -> LLParserLimits:
    """Limits of compiling and of every step. Of the library's fuel some 14 thousand are a millisecond of a step."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=50_000,
        step_max_items=10_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def setup(payload: bytes) -> Mapping[str, Callable[[bytes], bytes]]:
    """`payload`: `{"tokenizer": text, "vocab_size": number, "eos_token_ids": numbers}` of the worker's tokenizer."""
    order = orjson.loads(payload)
    tokenizer = LLTokenizer(order["tokenizer"], n_vocab=order["vocab_size"], eos_token=order["eos_token_ids"])
    limits = parser_limits()

    def prove(request: bytes) -> bytes:
        return orjson.dumps(_prove(tokenizer, limits, request.decode()))

    # Pages that a small grammar touches are the job's own before its call comes.
    return {"prove": prove, "warm": lambda _: prove(_SMALL.encode()) and b""}


def _prove(tokenizer: LLTokenizer, limits: LLParserLimits, grammar: str) -> dict[str, object]:
    """`refusal`: why the grammar does not compile, else null; `bytes`: what it takes; `seconds` of computing."""
    before, began = _resident_bytes(), time.process_time()
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    size = _resident_bytes() - before
    refusal = matcher.get_error() if matcher.is_error() else _rehearse(matcher.deep_copy())
    return {"refusal": refusal, "bytes": max(0, size), "seconds": time.process_time() - began}


def _rehearse(matcher: LLMatcher) -> str | None:
    """Write a few tokens. The words of the error where a limit is met."""
    rng = random.Random(0)
    for _ in range(REHEARSED_TOKENS):
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            return matcher.get_error()
        places = [place for place, byte in enumerate(mask) if byte]
        if matcher.is_stopped() or not places:
            return None
        place = rng.choice(places)
        bit = rng.choice([bit for bit in range(8) if mask[place] >> bit & 1])
        if not matcher.consume_token(8 * place + bit):
            return matcher.get_error()
    return None


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
