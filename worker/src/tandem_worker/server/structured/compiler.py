"""Compiles JSON schemas, regexes and grammars for one tokenizer.

Every grammar takes three steps: its size is looked at, a process of its own proves that it compiles within limits, and
then it is compiled here. What came of it is kept, refusals too, the least recently used dropped.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from typing import Any

import orjson
from llguidance import LLMatcher, LLTokenizer, StructTag, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from tandem_worker.engine.guess.literals import LiteralText
from tandem_worker.host.isolation.confined import Confined
from tandem_worker.host.isolation.contract import FunctionError, IsolationError, LimitError, Limits, UnavailableError
from tandem_worker.server.structured.contract import CompileCounts, GrammarError, GrammarUnavailableError, StructuralTag
from tandem_worker.server.structured.grammar import TokenGrammarFactory
from tandem_worker.server.structured.limits import GrammarLimits
from tandem_worker.server.structured.literals import read_words
from tandem_worker.server.structured.proving import parser_limits

logger = logging.getLogger(__name__)

MAX_CACHED = 128
MAX_CACHED_BYTES = 256 << 20
"""Memory of the compiled grammars that are kept, as the proving process measures them."""
LEAST_BYTES = 256 << 10
"""A compiled grammar counts as at least this much: what it shares with freed memory is not seen as growth."""
MOST_READ = 16 << 10
"""Characters of a grammar whose texts are read beside other requests: a millisecond, or five of short ones alone."""
MAX_READ = 64
"""Such grammars whose texts are kept, two MiB each at the most, and others of which it is known that none are."""
MAX_PENDING = 32
"""Grammars that may wait to be compiled."""
REQUEST_SECONDS = 10.0
"""For all grammars that one request needs compiled, waiting included. Who waits longer is told to try again."""
START_SECONDS = 60.0
JOB_LIMITS = Limits(
    memory_bytes=128 << 20,
    stack_bytes=512 << 10,  # a quarter of the least that a thread of the worker has, which compiles it again
    cpu_seconds=2.0,
    answer_bytes=1 << 20,
)
"""Seconds decide over no grammar that a client may send: what `limits` and the library's own limits let through takes a
tenth of that on a slow machine. They end what hangs."""
WHITESPACE = r"(\x20|\n\x20{0,40})?"
"""White space between the tokens of JSON: a space, or a line break with an indent. Bounded, so that a weak model
cannot spend its whole answer on it."""
HEADER = '%llguidance {"no_forcing": true}\n'
"""Without it, each mask spells out all text that is certain to follow: a millisecond for a thousand characters, which
no limit of the library counts."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Either a factory or a refusal."""

    factory: TokenGrammarFactory | None
    refusal: str
    size: int


class GrammarCompiler:
    """One per process. `start` prepares what compiling needs, else the first grammar does; `close` ends its process."""

    def __init__(
        self, tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int], limits: GrammarLimits | None = None
    ) -> None:
        self.limits = limits or GrammarLimits()
        self.counts = CompileCounts()
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._parser_limits = parser_limits()
        self._prepared: LLTokenizer | None = None
        self._confined: Confined | None = None
        self._cache: OrderedDict[bytes, _Outcome] = OrderedDict()
        self._cached_bytes = 0
        self._read: dict[bytes, LiteralText | None] = {}
        """Texts of grammars that are not compiled, by what these are written from; used on the event loop."""
        self._num_pending = 0
        self._lock = threading.Lock()
        self._preparing = threading.Lock()
        self._started = self._closed = False
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="grammars")

    def start(self) -> None:
        """Returns at once. Grammars that come before all is prepared wait no longer than their deadline."""
        self._started = True
        self._threads.submit(self._prepare, None)

    def prepare(self) -> None:
        """As `start`, and wait until it is done. Raises GrammarUnavailableError."""
        self._started = True
        try:
            self._prepare(None)
        except IsolationError as error:
            raise GrammarUnavailableError(str(error)) from error

    def close(self) -> None:
        """End the threads and the isolated process; compilations that wait are cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._closed, confined = True, self._confined
        if confined is not None:
            confined.close()

    @property
    def num_restarts(self) -> int:
        """Times that the proving process was started again."""
        return 0 if self._confined is None else self._confined.num_restarts

    @property
    def process_id(self) -> int | None:
        """Process id of the proving process; None while there is none."""
        return None if self._confined is None else self._confined.process_id

    # -- from what clients send to one grammar ------------------------------------------------------------------------

    def write_json_schema(self, schema: Mapping[str, Any]) -> str:
        """Answers are JSON values that the schema admits. Raises GrammarError."""
        self.limits.check_schema(schema)
        return f"{HEADER}start: {embed_json_schema(schema)}\n"

    def write_lark(self, grammar: str) -> str:
        """Answers are sentences of a client's grammar, in llguidance's dialect of Lark. Raises GrammarError."""
        self.limits.check_lark(grammar)
        return HEADER + grammar

    def write_gbnf(self, grammar: str) -> str:
        """As `write_lark`, from the dialect that has `root ::= …`. Raises GrammarError."""
        self.limits.check_gbnf(grammar)
        try:
            lark = gbnf_to_lark(grammar)
        except Exception as error:  # the converter raises bare exceptions, in its own words
            raise GrammarError(f"it is not in GBNF: {error}") from error
        return HEADER + lark.removeprefix("%llguidance {}\n")

    def write_regex(self, regex: str) -> str:
        """Answers are texts that the regex matches as a whole. Raises GrammarError."""
        self.limits.check_regex(regex)
        return f"{HEADER}start: /{regex_to_lark(regex, '')}/\n"

    def read_literals(self, source: bytes, write: Callable[[], str]) -> LiteralText | None:
        """The texts of a grammar that holds nobody, which `write` makes of `source` alone; None where it makes none, or
        a large one. Both take time from the requests beside it, so of many that ask for the same the first one pays."""
        key = hashlib.blake2b(source, digest_size=16).digest()
        if key not in self._read:
            self._read[key] = self._read_new(write)
            if len(self._read) > MAX_READ:
                del self._read[next(iter(self._read))]
        return self._read[key]

    def _read_new(self, write: Callable[[], str]) -> LiteralText | None:
        try:
            grammar = write()
        except GrammarError:  # nobody asked for that
            return None
        if len(grammar) > MOST_READ:
            return None
        return LiteralText(read_words(grammar, self._tokenizer.backend_tokenizer.id_to_token)[0])

    # -- compiling -------------------------------------------------------------------------------------------------

    async def compile(self, grammar: str, deadline: float) -> TokenGrammarFactory:
        """`grammar` as `write_*` or `build_grammar` make it. Raises GrammarError, GrammarUnavailableError."""
        known = self._look_up(grammar)
        if known is not None:
            return _use(known)
        if self._num_pending >= MAX_PENDING:
            self.counts.unavailable += 1
            raise GrammarUnavailableError(f"{MAX_PENDING} grammars wait to be compiled already: try again")
        self._num_pending += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, self.compile_here, grammar, deadline)
        finally:
            self._num_pending -= 1

    def compile_here(self, grammar: str, deadline: float | None = None) -> TokenGrammarFactory:
        """As `compile`, on the calling thread."""
        known = self._look_up(grammar)
        if known is not None:
            return _use(known)
        began = time.monotonic()
        try:
            outcome = self._make(grammar, deadline)
        except GrammarUnavailableError as error:
            self.counts.unavailable += 1
            logger.warning("a grammar could not be compiled: %s", error)
            raise
        except GrammarError as error:  # of this moment: not to be kept
            self.counts.refused += 1
            logger.info("a grammar was refused: %s", error)
            raise
        finally:
            self.counts.seconds += time.monotonic() - began
        if outcome.factory is None:
            self.counts.refused += 1
            logger.info("a grammar was refused: %s", outcome.refusal)
        else:
            self.counts.compiled += 1
        self._keep(grammar, outcome)
        return _use(outcome)

    def _make(self, grammar: str, deadline: float | None) -> _Outcome:
        """Raises GrammarUnavailableError, and GrammarError for what another time may have another end."""
        try:
            self.limits.check_text(grammar)
            began = time.monotonic()
            prepared, confined = self._prepare(deadline if self._started else None)
            late = 0.0 if self._started else time.monotonic() - began  # nobody had started it: that is not the input's
            seconds = _remaining(deadline) + late
            proof = orjson.loads(confined.call_here("prove", grammar.encode(errors="replace"), seconds=seconds))
        except LimitError as error:
            if error.limit == "deadline":
                raise GrammarUnavailableError(
                    f"a grammar was not compiled within {REQUEST_SECONDS:g} s: try again"
                ) from error
            return _Outcome(None, f"compiling it {error}", 0)
        except FunctionError as error:
            return _Outcome(None, f"it cannot be compiled: {error}", 0)
        except IsolationError as error:
            raise GrammarUnavailableError(str(error)) from error
        if proof["refusal"] is not None:
            return _Outcome(None, _tidy(proof["refusal"]), 0)
        matcher = LLMatcher(prepared, grammar, log_level=0, limits=self._parser_limits)
        if matcher.is_error():
            return _Outcome(None, _tidy(matcher.get_error()), 0)
        words, num_bytes = read_words(grammar, self._tokenizer.backend_tokenizer.id_to_token)
        literals = LiteralText(words)
        factory = TokenGrammarFactory(matcher, (self._vocab_size + 31) // 32, self._eos_token_ids, literals=literals)
        size = max(LEAST_BYTES, int(proof["bytes"])) + num_bytes + literals.num_bytes
        return _Outcome(factory, "", size)

    def _prepare(self, deadline: float | None) -> tuple[LLTokenizer, Confined]:
        """About a second for a large vocabulary, here and in the proving process at once."""
        if not self._preparing.acquire(timeout=max(0.0, min(START_SECONDS, _remaining(deadline)))):
            raise GrammarUnavailableError("the process that compiles grammars is still starting: try again")
        try:
            text = _tokenizer_text(self._tokenizer) if self._prepared is None else ""
            if self._confined is None:
                eos = sorted(self._eos_token_ids)
                order = {"tokenizer": text, "vocab_size": self._vocab_size, "eos_token_ids": eos}
                confined = Confined(
                    "tandem_worker.server.structured.proving:setup",
                    orjson.dumps(order),
                    limits=JOB_LIMITS,
                    name="grammars",
                )
                with self._lock:
                    if self._closed:  # nobody would end it, and the end of this process would wait until it has started
                        raise UnavailableError("the process that compiles grammars has been closed")
                    self._confined = confined
                self._confined.start()
            elif self._prepared is None:  # the last try has failed: that process may know that there is no use
                self._confined.wait_until_ready(max(0.0, min(START_SECONDS, _remaining(deadline))))
            if self._prepared is None:
                prepared = self._load_tokenizer(text)
                self._confined.wait_until_ready(START_SECONDS)
                self._confined.call_here("warm", b"", seconds=START_SECONDS)
                self._prepared = prepared
            return self._prepared, self._confined
        finally:
            self._preparing.release()

    def _load_tokenizer(self, text: str) -> LLTokenizer:
        """Raises UnavailableError."""
        try:
            return LLTokenizer(text, n_vocab=self._vocab_size, eos_token=sorted(self._eos_token_ids))
        except BaseException as error:  # a panic of the library is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise UnavailableError(f"the grammar library does not take this model's vocabulary: {error}") from error

    # -- keeping -----------------------------------------------------------------------------------------------------

    def _look_up(self, grammar: str) -> _Outcome | None:
        key = _digest(grammar)
        with self._lock:
            known = self._cache.get(key)
            if known is not None:
                self._cache.move_to_end(key)
                self.counts.cached += 1
            return known

    def _keep(self, grammar: str, outcome: _Outcome) -> None:
        with self._lock:
            before = self._cache.pop(_digest(grammar), None)
            self._cached_bytes += outcome.size - (before.size if before is not None else 0)
            self._cache[_digest(grammar)] = outcome
            while len(self._cache) > MAX_CACHED or self._cached_bytes > MAX_CACHED_BYTES:
                _, dropped = self._cache.popitem(last=False)
                self._cached_bytes -= dropped.size


def embed_json_schema(schema: Mapping[str, Any]) -> str:
    """A JSON schema as the right side of a Lark rule, with the white space that all JSON answers have."""
    return "%json " + json.dumps(bound_whitespace(schema))


def bound_whitespace(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with the white space that all JSON answers have."""
    return {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}


def _remaining(deadline: float | None) -> float:
    return START_SECONDS if deadline is None else deadline - time.monotonic()


def _use(outcome: _Outcome) -> TokenGrammarFactory:
    if outcome.factory is None:
        raise GrammarError(outcome.refusal)
    return outcome.factory


def _digest(grammar: str) -> bytes:
    return hashlib.blake2b(grammar.encode(errors="surrogatepass"), digest_size=16).digest()


def _tokenizer_text(tokenizer: Any) -> str:
    """The tokenizer as JSON, with tokens that were added to it since it was read from its file."""
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    return backend.to_str()


def _tidy(error: str) -> str:
    """The library's words without the place in a text that the client has not written."""
    line = error.strip().partition("\n")[0]
    _, found, words = line.partition("failed to compile JSON schema: ")
    return words if found else line


def write_structural_tags(tags: Sequence[StructuralTag], special: Collection[str]) -> str:
    """Structural tags as a grammar: answers are free text with these tags in it.

    `special`: texts of tokens that no text consists of.

    Raises:
        GrammarError: a text of a tag has one of `special`, so no answer could have it.
    """
    for tag in tags:
        for text in (tag.begin, tag.end):
            found = next((each for each in special if each and each in text), None)
            if found is not None:
                raise GrammarError(f"{text[:80]!r} has {found!r}, a special token of this model, which is no text")
    grammar = StructTag.to_grammar(
        [StructTag(trigger=t.trigger, begin=t.begin, grammar=bound_whitespace(t.schema), end=t.end) for t in tags],
        assume_special=False,
    )
    # DEL is the one character that JSON leaves as it is and Lark does not take.
    return HEADER + grammar.removeprefix("%llguidance {}\n").replace("\x7f", "\\u007f")
