"""What the server knows about the model it serves: names, limits, tokens. No weights."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

from tandem_api.launch import WorkerConfig

from tandem_worker.engine.errors import RequestError
from tandem_worker.engine.guess.literals import Spelling
from tandem_worker.model.pooling import EmbeddingSpec
from tandem_worker.server.dialects.openai.options import API_DEFAULTS, SamplingDefaults
from tandem_worker.server.prepare.counts import PreparationCounts
from tandem_worker.server.prepare.fitting import observe_bound
from tandem_worker.server.prepare.job import pack_setup
from tandem_worker.server.prepare.placing import Preparation
from tandem_worker.server.prepare.preparer import Preparer
from tandem_worker.server.prepare.prompting import Prompter
from tandem_worker.server.prepare.rules import PromptRules
from tandem_worker.server.structured.compiler import GrammarCompiler
from tandem_worker.server.text import reasoning
from tandem_worker.server.text.detokenizer import TokenTable
from tandem_worker.server.tools.formats import FORMATS, detect

# Tokens that end a turn or a text, by the names that published vocabularies give them. Checkpoints list several
# end tokens in generation settings that a tokenizer alone does not carry.
_END_TOKENS = (
    "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|eot|>", "<|eom|>",
    "<｜end▁of▁sentence｜>", "[EOS]", "<|return|>", "<|call|>", "<end_of_turn>",
)  # fmt: skip
_UNLIMITED = 10**8
"""Tokenizers without a limit state a huge one."""


class ServedModel:
    """Shared by all requests. `tool_format` names one of `FORMATS`; None detects it.

    `grammars`: a compiler for the same tokenizer, vocabulary and end tokens that somebody else closes.
    `preparation` is counted in.

    Raises ValueError when no context length is known, KeyError for an unknown format.
    """

    def __init__(
        self,
        tokenizer: Any,
        config: WorkerConfig,
        *,
        max_model_len: int | None = None,
        vocab_size: int | None = None,
        eos_token_ids: Collection[int] = (),
        tool_format: str | None = None,
        embedding: EmbeddingSpec | None = None,
        grammars: GrammarCompiler | None = None,
        sampling: SamplingDefaults = API_DEFAULTS,
        preparation: PreparationCounts | None = None,
    ) -> None:
        self.name = config.served_name
        """As it was at start. Answers carry the name that the request gave: names change while workers run."""
        self.root = config.model.uri
        """The URI that the weights come from."""
        self.fingerprint = f"fp_{config.revision}"
        self.embedding = embedding
        """None: the model generates text."""
        self.tokenizer = tokenizer
        self.table = TokenTable(tokenizer)
        self.vocab_size = vocab_size or len(tokenizer)
        """Rows of the output matrix: the tokenizer's vocabulary, maybe padded."""
        encode = partial(_encode, tokenizer.backend_tokenizer)
        self.spelling = Spelling(encode, self.table.token_bytes, self.vocab_size)
        """For guesses: used by the engine's threads."""
        self.guesses = config.speculative.method != "Off"
        """Whether somebody may guess what answers say."""
        self.tools = config.tools
        prompter = Prompter(tokenizer, self.tools)
        self.max_model_len = _context_length(tokenizer, config, max_model_len)
        self.eos_token_ids = frozenset(eos_token_ids) or end_tokens(tokenizer)
        self.vocabulary: dict[str, int] = tokenizer.get_added_vocab()
        """Added tokens: marks of turns, tools and reasoning are among them."""
        self.special_texts = tuple(text for text, token in self.vocabulary.items() if token in self.table.special_ids)
        self.takes_tools = prompter.takes_tools
        """Its chat template has a place for tools."""
        template = self.chat_template = prompter.template
        self.tool_format = FORMATS[tool_format] if tool_format is not None else detect(self.vocabulary, template)
        self.reasons = reasoning.BEGIN in self.vocabulary or reasoning.BEGIN in template
        """The model may think before it answers."""
        self.grammars = grammars or GrammarCompiler(tokenizer, self.vocab_size, self.eos_token_ids)
        self.owns_grammars = grammars is None
        self.free_form_grammars = config.free_form_grammars
        start = tokenizer.bos_token_id
        self.rules = PromptRules(
            name=self.name,
            # With keys only the model's gateways get this far, and they know which names are served at present.
            vouched=config.keys_path is not None,
            tools=self.tools,
            request_templates=config.request_chat_templates,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            start_token=start if start is not None else min(self.eos_token_ids, default=0),
            embedding_size=None if embedding is None else embedding.size,
            grammar_limits=self.grammars.limits,
            sampling=sampling,
        )
        bound = observe_bound(tokenizer.backend_tokenizer)
        self.preparation = Preparation(
            Preparer(prompter, self.rules, bound), partial(pack_setup, tokenizer, self.rules, bound), preparation
        )

    def close(self) -> None:
        """End the threads and processes that came with it."""
        self.preparation.close()
        if self.owns_grammars:
            self.grammars.close()

    def check_generates(self) -> None:
        """Raises RequestError for an embedding model."""
        if self.embedding is not None:
            raise RequestError(
                "This model computes embeddings and generates no text: use /v1/embeddings, /score or /rerank.",
                param="model",
                code="unsupported_endpoint",
            )

    def check_embeds(self) -> None:
        """Raises RequestError for a model that generates text."""
        if self.embedding is None:
            raise RequestError(
                "This model generates text; it does not provide embeddings.",
                param="model",
                code="unsupported_endpoint",
            )


def _encode(backend: Any, text: str) -> list[int]:
    return backend.encode(text, add_special_tokens=False).ids


def end_tokens(tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer, as far as the vocabulary tells."""
    vocabulary: dict[str, int] = tokenizer.get_added_vocab()
    found = {vocabulary[name] for name in _END_TOKENS if name in vocabulary}
    if tokenizer.eos_token_id is not None:
        found.add(int(tokenizer.eos_token_id))
    return frozenset(found)


def _context_length(tokenizer: Any, config: WorkerConfig, given: int | None) -> int:
    for candidate in (given, config.max_model_len, getattr(tokenizer, "model_max_length", None)):
        if candidate is not None and candidate < _UNLIMITED:
            return int(candidate)
    raise ValueError("the context length is unknown: give max_model_len")
