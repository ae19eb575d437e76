"""Requests that get no text: embeddings, and texts to compare: `/score` as vLLM has it, `/rerank` as vLLM and Jina have
it. Checked and typed. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tandem_worker.server.dialects.fields import Fields, refuse, wrong_type
from tandem_worker.server.dialects.openai.completion_request import Prompt, parse_prompts
from tandem_worker.server.dialects.openai.options import take_metadata, take_truncation

MAX_INPUTS = 2048
_QUERIES = ("queries", "text_1", "data_1")
_DOCUMENTS = ("documents", "items", "text_2", "data_2")
"""Names of the same thing: those of today, and those of before."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    model: str | None
    """None: whichever is served."""
    queries: tuple[str, ...]
    """One, which every document is compared with, or as many as there are documents."""
    documents: tuple[str, ...]
    paths: tuple[str, ...]
    """Paths in the body of each of the queries, and then of the documents."""
    ranks: bool
    """The best come first."""
    top_n: int | None
    """The best so many of them; None: all."""
    return_documents: bool
    cache_salt: str
    priority: int
    truncate_prompt: int | None


def parse_score(body: object) -> ScoreRequest:
    """Raises RequestError."""
    fields = Fields(body)
    queries, query_paths = _texts(fields, _one_of(fields, _QUERIES))
    name = _one_of(fields, _DOCUMENTS)
    documents, document_paths = _texts(fields, name)
    if len(queries) not in (1, len(documents)):
        refuse(
            name,
            f"'{name}' has {len(documents)} texts and there are {len(queries)} queries: give one query, "
            "or as many as there are documents.",
            "invalid_value",
        )
    return _finish(fields, queries, documents, query_paths + document_paths, ranks=False)


def parse_rerank(body: object) -> ScoreRequest:
    """Raises RequestError."""
    fields = Fields(body)
    query = fields.required_string("query", allow_empty=False)
    documents, paths = _texts(fields, "documents")
    return _finish(fields, (query,), documents, ("query", *paths), ranks=True)


def _finish(
    fields: Fields, queries: tuple[str, ...], documents: tuple[str, ...], paths: tuple[str, ...], *, ranks: bool
) -> ScoreRequest:
    take_metadata(fields)
    if len(paths) > MAX_INPUTS:
        refuse(
            "documents", f"At most {MAX_INPUTS} texts are compared, but there are {len(paths)}.",
            "array_above_max_length",
        )  # fmt: skip
    request = ScoreRequest(
        model=fields.string("model"),
        queries=queries,
        documents=documents,
        paths=paths,
        ranks=ranks,
        # vLLM's 0 means all of them.
        top_n=(fields.integer("top_n", minimum=0) or None) if ranks else None,
        return_documents=ranks and fields.boolean("return_documents", default=True),
        cache_salt=fields.string("cache_salt", max_length=256) or "",
        priority=fields.integer("priority", minimum=-1000, maximum=1000) or 0,
        truncate_prompt=take_truncation(fields),
    )
    fields.finish()
    return request


def _one_of(fields: Fields, names: tuple[str, ...]) -> str:
    """The name that is used; the first where none is."""
    given = [name for name in names if fields.given(name)]
    if len(given) > 1:
        refuse(given[1], f"'{given[1]}' is another name for '{given[0]}': give one of them.")
    return given[0] if given else names[0]


def _texts(fields: Fields, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The texts, and where they stand."""
    value = fields.required(name)
    if isinstance(value, str) or (isinstance(value, dict) and "text" in value):
        return (_text(value, name),), (name,)
    if not isinstance(value, list):
        wrong_type(name, "a string or an array of strings", value)
    if not value:
        refuse(name, f"'{name}' must not be empty.", "empty_array")
    paths = tuple(f"{name}[{index}]" for index in range(len(value)))
    return tuple(map(_text, value, paths)), paths


def _text(value: Any, path: str) -> str:
    """A string, or Jina's object of one."""
    text = value.get("text") if isinstance(value, dict) and value.keys() == {"text"} else value
    if not isinstance(text, str):
        wrong_type(path, "a string", value)
    return text
