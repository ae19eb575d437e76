"""`POST /v1/embeddings`: its texts through the engine, and the vectors as OpenAI writes them; `/score` and `/rerank`
compare such vectors."""

from __future__ import annotations

import base64
import dataclasses
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import orjson
from starlette.types import Receive, Send
from tandem_api import names

from tandem_worker.engine.contract import Engine
from tandem_worker.engine.schedule.params import GenerationRequest, SamplingParams, TokenDelta
from tandem_worker.model.pooling import EmbeddingSpec
from tandem_worker.server.answer.answerer import raise_failure
from tandem_worker.server.answer.deltas import DeltaHub
from tandem_worker.server.answer.flight import Flight
from tandem_worker.server.dialects.openai.pooling_requests import EmbeddingRequest, ScoreRequest
from tandem_worker.server.prepare.draft import PreparedEmbedding, PreparedScore, Tokens
from tandem_worker.server.prepare.served_model import ServedModel
from tandem_worker.server.text.output import Usage
from tandem_worker.server.wire.http import send_parts
from tandem_worker.server.wire.pacing import Steps, pace

MAX_IN_ENGINE = 128
"""Texts of one request that are in the engine at a time: the others leave room in its queue."""

_SLICE_VECTORS = 4
_SLICE_SCORES = 128

Vector = np.ndarray[Any, np.dtype[np.float32]]


def finish_vector(pooled: bytes, spec: EmbeddingSpec, dimensions: int | None) -> Vector:
    """The model's vector, cut to its first `dimensions` numbers; of length 1 if the model normalizes, or it was cut."""
    vector = np.frombuffer(pooled, dtype=np.float32)[:dimensions]
    if spec.normalize or dimensions is not None:
        vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
    return vector.astype("<f4")


class Embedder:
    """Runs embedding requests. One per process."""

    def __init__(self, engine: Engine, hub: DeltaHub, pod_name: str, model: ServedModel) -> None:
        self._engine = engine
        self._hub = hub
        self._pod_name = pod_name
        self._model = model

    async def run(self, prepared: PreparedEmbedding, receive: Receive, send: Send) -> Usage:
        """Raises RequestError, EngineStoppedError, ServiceError, ClientGoneError."""
        request = prepared.request
        results, spec, usage = await self._embed(request, prepared.tokens, receive)
        vectors = (finish_vector(each, spec, request.dimensions) for each in results)
        await self._send(send, await pace(_write_response(vectors, request, usage)))
        return usage

    async def compare(self, prepared: PreparedScore, receive: Receive, send: Send) -> Usage:
        """Raises RequestError, EngineStoppedError, ServiceError, ClientGoneError."""
        request = prepared.request
        results, spec, usage = await self._embed(request, prepared.tokens, receive)
        scores = await pace(_compare(results, spec, len(request.queries)))
        write = _write_ranks if request.ranks else _write_scores
        await self._send(send, [orjson.dumps(write(scores, request, usage))])
        return usage

    async def _send(self, send: Send, parts: list[bytes]) -> None:
        headers = {names.HEADER_DECODE_WORKER: self._pod_name, names.HEADER_PREFILL_WORKER: self._pod_name}
        await send_parts(send, parts, headers=headers)

    async def _embed(
        self, request: EmbeddingRequest | ScoreRequest, prompts: Sequence[Tokens], receive: Receive
    ) -> tuple[list[bytes], EmbeddingSpec, Usage]:
        """What the model pools of each prompt."""
        spec = self._model.embedding
        assert spec is not None
        requests = self._plan(request, prompts, spec)
        results = await self._compute(requests, receive)
        usage = Usage(
            prompt_tokens=sum(len(each.prompt_token_ids) for each in requests),
            cached_tokens=sum(result.num_cached_tokens for result in results),
            completion_tokens=0,
            reasoning_tokens=0,
        )
        return [result.embedding or b"" for result in results], spec, usage

    @staticmethod
    def _plan(
        request: EmbeddingRequest | ScoreRequest, prompts: Sequence[Tokens], spec: EmbeddingSpec
    ) -> list[GenerationRequest]:
        prefix = f"embd-{secrets.token_hex(16)}"
        return [
            GenerationRequest(
                request_id=f"{prefix}-{index}",
                prompt_token_ids=tuple(tokens),
                sampling=SamplingParams(max_tokens=0),
                priority=request.priority,
                cache_salt=request.cache_salt,
                pooling=spec.pooling,
            )
            for index, tokens in enumerate(prompts)
        ]

    async def _compute(self, requests: Sequence[GenerationRequest], receive: Receive) -> list[TokenDelta]:
        """The delta with the vector of each request, in order."""
        results: dict[str, TokenDelta] = {}
        for start in range(0, len(requests), MAX_IN_ENGINE):
            part = requests[start : start + MAX_IN_ENGINE]
            async with Flight(self._engine, self._hub, part, receive) as flight:
                missing = len(part)
                while missing:
                    for delta in await flight.receive():
                        raise_failure(delta)
                        results[delta.request_id] = delta
                        missing -= 1
        return [results[request.request_id] for request in requests]


def _write_response(vectors: Iterable[Vector], request: EmbeddingRequest, usage: Usage) -> Steps[list[bytes]]:
    """In parts: 2,048 vectors may be 100 MB."""
    parts = [b'{"object":"list","data":[']
    for index, vector in enumerate(vectors):
        if index and index % _SLICE_VECTORS == 0:
            yield
        item = {"object": "embedding", "index": index, "embedding": _write(vector, request.encoding)}
        parts.append(b"," + orjson.dumps(item) if index else orjson.dumps(item))
    parts.append(b'],"model":%b,"usage":%b}' % (orjson.dumps(request.model), orjson.dumps(_counts(usage))))
    return parts


def _write(vector: Vector, encoding: Literal["float", "base64"]) -> str | list[float]:
    """base64 is of little-endian float32, as OpenAI's clients read it."""
    return base64.b64encode(vector.tobytes()).decode() if encoding == "base64" else vector.tolist()


def _counts(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _compare(pooled: Sequence[bytes], spec: EmbeddingSpec, num_queries: int) -> Steps[list[float]]:
    """The cosine of every document's vector and its query's."""
    unit = dataclasses.replace(spec, normalize=True)
    queries = [finish_vector(each, unit, None) for each in pooled[:num_queries]]
    scores: list[float] = []
    for index, each in enumerate(pooled[num_queries:]):
        if index and index % _SLICE_SCORES == 0:
            yield
        query = queries[index if num_queries > 1 else 0]
        scores.append(float(np.dot(query, finish_vector(each, unit, None))))
    return scores


def _write_scores(scores: list[float], request: ScoreRequest, usage: Usage) -> dict[str, Any]:
    return {
        "id": f"score-{secrets.token_hex(16)}",
        "object": "list",
        "created": int(time.time()),
        "model": request.model,
        "data": [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)],
        "usage": _counts(usage),
    }


def _write_ranks(scores: list[float], request: ScoreRequest, usage: Usage) -> dict[str, Any]:
    """The best first, of equals those that were given first."""
    ranks = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n]
    return {
        "id": f"rerank-{secrets.token_hex(16)}",
        "model": request.model,
        "results": [
            {"index": index}
            | ({"document": {"text": request.documents[index]}} if request.return_documents else {})
            | {"relevance_score": scores[index]}
            for index in ranks
        ],
        "usage": _counts(usage),
    }
