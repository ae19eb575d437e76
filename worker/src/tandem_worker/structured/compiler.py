"""Compiles JSON schemas and grammars for one tokenizer. Compiled ones are kept, the least recently used dropped."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer

from tandem_worker.structured.grammar import GrammarError, TokenGrammarFactory

MAX_CACHED = 128
WHITESPACE = r"(\x20|\n\x20{0,40})?"
"""White space between the tokens of JSON: a space, or a line break with an indent. Bounded, so that a weak model
cannot spend its whole answer on it."""


class GrammarCompiler:
    """One per process. `compile_*` may take some hundred milliseconds for huge schemas and may run on any thread."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._prepared: LLTokenizer | None = None
        self._cache: OrderedDict[str, TokenGrammarFactory] = OrderedDict()
        self._lock = threading.Lock()

    def compile_json_schema(self, schema: Mapping[str, Any]) -> TokenGrammarFactory:
        """Answers are JSON values that the schema admits. Raises GrammarError."""
        try:
            grammar = LLMatcher.grammar_from_json_schema(dict(schema), overrides={"whitespace_pattern": WHITESPACE})
        except ValueError as error:
            raise GrammarError(str(error)) from error
        return self._compile(grammar)

    def compile_lark(self, grammar: str) -> TokenGrammarFactory:
        """Answers are sentences of the grammar, in llguidance's dialect of Lark. Raises GrammarError."""
        return self._compile(LLMatcher.grammar_from_lark(grammar))

    def compile_regex(self, grammar: str) -> TokenGrammarFactory:
        """`grammar` is a regex: answers are texts that it matches as a whole. Raises GrammarError."""
        return self._compile(LLMatcher.grammar_from_regex(grammar))

    def _compile(self, grammar: str) -> TokenGrammarFactory:
        with self._lock:
            known = self._cache.get(grammar)
            if known is not None:
                self._cache.move_to_end(grammar)
                return known
            if self._prepared is None:
                # About a second for a large vocabulary: only those who use grammars pay.
                self._prepared = from_tokenizer(
                    self._tokenizer, n_vocab=self._vocab_size, eos_token=sorted(self._eos_token_ids)
                )
            prepared = self._prepared
        matcher = LLMatcher(prepared, grammar, log_level=0)
        if matcher.is_error():
            raise GrammarError(matcher.get_error().strip().splitlines()[0])
        factory = TokenGrammarFactory(matcher, (self._vocab_size + 31) // 32, self._eos_token_ids)
        with self._lock:
            self._cache[grammar] = factory
            if len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        return factory


def embed_json_schema(schema: Mapping[str, Any]) -> str:
    """A JSON schema as the right side of a Lark rule, with the white space that `compile_json_schema` allows."""
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}})
