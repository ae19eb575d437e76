"""Drafts of requests whose texts get no answer: embeddings, scores and ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tandem_worker.server.dialects.fields import refuse
from tandem_worker.server.dialects.openai.pooling_requests import ScoreRequest, parse_embedding
from tandem_worker.server.prepare.draft import (
    Draft,
    PreparedEmbedding,
    PreparedScore,
    Text,
    Tokens,
    cut_count,
    cut_front,
    fill_in,
)
from tandem_worker.server.prepare.rules import PromptRules


def draft_embedding(rules: PromptRules, body: Any) -> Draft:
    """Raises RequestError."""
    assert rules.embedding_size is not None
    request = parse_embedding(body, rules.vocab_size, rules.embedding_size)
    request = dataclasses.replace(request, model=rules.name if request.model is None else request.model)
    rules.check_name(request.model or "")
    most = _longest_input(rules, request.truncate_prompt)
    texts: list[Text] = []
    for index, each in enumerate(request.inputs):
        path = "input" if len(request.inputs) == 1 else f"input[{index}]"
        if isinstance(each, str):
            texts.append(Text(each, True, check_text_input(rules, path, most)))
        else:
            rules.check_input(cut_count(len(each), most), param=path)

    def finish(encoded: Sequence[Tokens]) -> PreparedEmbedding:
        tokens = [cut_front(each, most) for each in fill_in(request.inputs, encoded)]
        return PreparedEmbedding(request=request, tokens=tokens)

    return Draft(texts, finish)


def draft_comparison(rules: PromptRules, request: ScoreRequest) -> Draft:
    """Queries and documents that are to be compared. Raises RequestError."""
    request = dataclasses.replace(request, model=rules.name if request.model is None else request.model)
    rules.check_name(request.model or "")
    most = _longest_input(rules, request.truncate_prompt)
    texts = [
        Text(text, True, check_text_input(rules, path, most))
        for text, path in zip((*request.queries, *request.documents), request.paths, strict=True)
    ]
    return Draft(
        texts, lambda encoded: PreparedScore(request=request, tokens=[cut_front(each, most) for each in encoded])
    )


def _longest_input(rules: PromptRules, truncate: int | None) -> int | None:
    """Tokens that are taken of a text that gets no answer; None: all, or it is refused."""
    return rules.max_model_len if truncate == -1 else truncate


def check_text_input(rules: PromptRules, path: str, most: int | None) -> Callable[[int, bool], None]:
    """The check of a text that gets no answer, of which at most so many tokens are taken."""

    def check(num_tokens: int, least: bool) -> None:
        if not num_tokens and not least:
            refuse(path, f"'{path}' must not be empty.", "empty_string")
        rules.check_input(cut_count(num_tokens, most), param=path, least=least)

    return check
