"""Embeddings over HTTP from the real engine, against transformers with the same pooling."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from tandem_api.launch import KVConfig, ModelSource, SchedulerConfig, WorkerConfig
from tandem_api.names import Role
from tandem_worker.engine.build import build_engine
from tandem_worker.model.load import load_model
from tandem_worker.server.answer.deltas import DeltaHub
from tandem_worker.server.app import build_app
from tandem_worker.server.wire.serving import serve

HIDDEN = 48
TEXTS = ["What is the capital of China?", "The capital of China is Beijing. " * 8, "é", "the " * 60]
POOLINGS = {
    "lasttoken": {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False},
    "mean": {"pooling_mode": "mean"},
    "cls": {"pooling_mode_cls_token": True},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A tiny Qwen3 with random weights, saved as sentence-transformers does: without the names' `model.`."""
    from transformers import Qwen3Config, Qwen3Model

    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=300, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, max_position_embeddings=512, initializer_range=0.3,
    )  # fmt: skip
    model = Qwen3Model(config).eval()
    folder = tmp_path_factory.mktemp("embedding")
    model.save_pretrained(folder)
    return folder, model


@contextlib.asynccontextmanager
async def serving(
    folder: Path, tokenizer: Any, pooling: str, *, normalize: bool = True, runs_ahead: bool = False
) -> AsyncIterator[Any]:
    """An engine with few blocks of 16 tokens and steps of at most 48 tokens, and a client."""
    modules = ["Transformer", "Pooling", "Normalize"][: 3 if normalize else 2]
    paths = ["", "1_Pooling", "2_Normalize"]
    listed = [
        {"idx": index, "name": str(index), "path": paths[index], "type": f"sentence_transformers.models.{kind}"}
        for index, kind in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": HIDDEN} | POOLINGS[pooling])
    )
    model = load_model(folder, device=torch.device("cpu"), dtype=torch.float32)
    config = WorkerConfig(
        model_name="e", served_name="e", role=Role.UNIFIED, revision="r1", model=ModelSource(uri="file:///e"),
        kv=KVConfig(memory_bytes=2 * 1024 * 1024), scheduler=SchedulerConfig(max_batch_tokens=48),
    )  # fmt: skip
    hub = DeltaHub()
    engine = build_engine(model, config, hub.deliver, runs_ahead=runs_ahead)
    app = build_app(
        engine, tokenizer, config, hub=hub, pod_name="pod-0", ready=lambda: True,
        draining=lambda: False, max_model_len=engine.max_model_len, vocab_size=model.vocab_size,
        embedding=model.embedding,
    )  # fmt: skip
    server = await serve(app, "127.0.0.1", 0)
    try:
        async with (
            httpx.AsyncClient(verify=False) as transport,
            openai.AsyncOpenAI(
                base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0, timeout=120,
                http_client=transport,
            ) as client,
        ):  # fmt: skip
            yield client
        async with asyncio.timeout(30):
            while not engine.idle:  # noqa: ASYNC110 - the engine has its own thread
                await asyncio.sleep(0.01)
        assert engine.stats().kv_blocks_used == 0
    finally:
        await server.stop()
        engine.stop()


def expect(reference: Any, tokens: list[int], pooling: str, *, normalize: bool = True) -> np.ndarray:
    with torch.no_grad():
        hidden = reference(input_ids=torch.tensor([tokens])).last_hidden_state[0]
    pooled = {"lasttoken": hidden[-1], "mean": hidden.mean(dim=0), "cls": hidden[0]}[pooling]
    return (pooled / pooled.norm() if normalize else pooled).numpy()


def assert_close(found: list[float], expected: np.ndarray) -> None:
    np.testing.assert_allclose(np.array(found), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("pooling", POOLINGS)
async def test_equals_transformers(pooling: str, checkpoint: tuple[Path, Any], tokenizer: Any) -> None:
    folder, reference = checkpoint
    async with serving(folder, tokenizer, pooling) as client:
        for _ in range(2):  # the second time the prefix cache has them
            answer = await client.embeddings.create(model="e", input=TEXTS)
            for index, (item, text) in enumerate(zip(answer.data, TEXTS, strict=True)):
                assert item.index == index
                assert_close(item.embedding, expect(reference, tokenizer.encode(text), pooling))
        counts = [len(tokenizer.encode(text)) for text in TEXTS]
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(counts)
        cached = answer.usage.prompt_tokens_details["cached_tokens"]
        assert cached == (sum((count - 1) // 16 * 16 for count in counts) if pooling == "lasttoken" else 0)


async def test_forms_of_input_and_output(checkpoint: tuple[Path, Any], tokenizer: Any) -> None:
    folder, reference = checkpoint
    async with serving(folder, tokenizer, "lasttoken", normalize=False) as client:
        tokens = tokenizer.encode(TEXTS[0])
        expected = expect(reference, tokens, "lasttoken", normalize=False)
        for given in (TEXTS[0], [TEXTS[0]], tokens, [tokens]):
            for encoding in ("float", "base64"):
                answer = await client.embeddings.create(model="e", input=given, encoding_format=encoding)
                (item,) = answer.data
                vector = item.embedding
                if isinstance(vector, str):
                    vector = np.frombuffer(base64.b64decode(vector), dtype="<f4").tolist()
                assert_close(vector, expected)
        cut = (await client.embeddings.create(model="e", input=TEXTS[0], dimensions=16)).data[0].embedding
        assert_close(cut, expected[:16] / np.linalg.norm(expected[:16]))


async def test_a_step_ahead_changes_nothing(checkpoint: tuple[Path, Any], tokenizer: Any) -> None:
    folder, reference = checkpoint
    async with serving(folder, tokenizer, "mean", runs_ahead=True) as client:
        answer = await client.embeddings.create(model="e", input=TEXTS)
    for item, text in zip(answer.data, TEXTS, strict=True):
        assert_close(item.embedding, expect(reference, tokenizer.encode(text), "mean"))


async def test_many_inputs_share_the_engine(checkpoint: tuple[Path, Any], tokenizer: Any) -> None:
    folder, reference = checkpoint
    inputs = [[5, number % 250, number // 250] for number in range(300)]
    async with serving(folder, tokenizer, "mean") as client:
        answer = await client.embeddings.create(model="e", input=inputs)
        for number in (0, 127, 128, 299):
            assert_close(answer.data[number].embedding, expect(reference, inputs[number], "mean"))
        await asyncio.gather(*(client.embeddings.create(model="e", input=TEXTS) for _ in range(4)))


async def test_what_is_refused(checkpoint: tuple[Path, Any], tokenizer: Any) -> None:
    folder, _ = checkpoint
    async with serving(folder, tokenizer, "lasttoken") as client:
        for options, param, code in (
            ({"input": ""}, "input", "empty_string"),
            ({"input": ["a", ""]}, "input[1]", "empty_string"),
            ({"input": []}, "input", "empty_array"),
            ({"input": [300]}, "input[0]", "integer_above_max_value"),
            ({"input": "a" * 5000}, "input", "context_length_exceeded"),
            ({"input": "a", "dimensions": HIDDEN + 1}, "dimensions", "integer_above_max_value"),
            ({"input": "a", "dimensions": 0}, "dimensions", "integer_below_min_value"),
            ({"input": "a", "encoding_format": "int8"}, "encoding_format", "invalid_value"),
            ({"input": "a", "extra_body": {"temperature": 1}}, "temperature", "unknown_parameter"),
        ):
            with pytest.raises(openai.BadRequestError) as refusal:
                await client.embeddings.create(model="e", **options)
            assert (refusal.value.param, refusal.value.code) == (param, code)
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="other", input="a")
        with pytest.raises(openai.BadRequestError, match="generates no text"):
            await client.chat.completions.create(model="e", messages=[{"role": "user", "content": "x"}])
        with pytest.raises(openai.BadRequestError, match="generates no text"):
            await client.completions.create(model="e", prompt="x")


DOCUMENTS = TEXTS[1:]


async def post(client: openai.AsyncOpenAI, path: str, **body: Any) -> httpx.Response:
    root = str(client.base_url).removesuffix("/v1/")
    async with httpx.AsyncClient(verify=False) as http:
        return await http.post(f"{root}{path}", json=body)


async def test_scores_are_the_cosines_of_embeddings(checkpoint: tuple[Path, Any], tokenizer: Any) -> None:
    folder, reference = checkpoint
    query, *others = (expect(reference, tokenizer.encode(text), "mean") for text in TEXTS)
    cosines = [float(query @ other) for other in others]
    async with serving(folder, tokenizer, "mean", normalize=False) as client:
        for path in ("/score", "/v1/score"):
            for names in (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2")):
                answer = (
                    await post(client, path, model="e", **dict(zip(names, (TEXTS[0], DOCUMENTS), strict=True)))
                ).json()
                np.testing.assert_allclose([each["score"] for each in answer["data"]], cosines, atol=1e-4)
        assert [each["index"] for each in answer["data"]] == [0, 1, 2]
        assert answer["usage"]["prompt_tokens"] == sum(len(tokenizer.encode(text)) for text in TEXTS)
        pairs = (await post(client, "/score", queries=DOCUMENTS, documents=DOCUMENTS)).json()["data"]
        np.testing.assert_allclose([each["score"] for each in pairs], 1, atol=1e-5)


async def test_ranks_begin_with_the_best(checkpoint: tuple[Path, Any], tokenizer: Any) -> None:
    folder, reference = checkpoint
    query, *others = (expect(reference, tokenizer.encode(text), "lasttoken") for text in TEXTS)
    cosines = [float(query @ other) for other in others]
    best = sorted(range(3), key=lambda index: -cosines[index])
    async with serving(folder, tokenizer, "lasttoken") as client:
        answer = (await post(client, "/rerank", model="e", query=TEXTS[0], documents=DOCUMENTS)).json()
        assert [each["index"] for each in answer["results"]] == best
        found = [each["relevance_score"] for each in answer["results"]]
        np.testing.assert_allclose(found, sorted(cosines, reverse=True), atol=1e-4)
        assert [each["document"]["text"] for each in answer["results"]] == [DOCUMENTS[index] for index in best]
        objects = [{"text": text} for text in DOCUMENTS]
        body = {"query": TEXTS[0], "documents": objects, "top_n": 2, "return_documents": False}
        few = (await post(client, "/v1/rerank", **body)).json()["results"]
        assert [each["index"] for each in few] == best[:2]
        assert few[0].keys() == {"index", "relevance_score"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/score", {"documents": "a"}, "queries"),
        ("/score", {"queries": ["a", "b"], "documents": ["a", "b", "c"]}, "documents"),
        ("/score", {"queries": "a", "documents": "a", "text_2": "a"}, "text_2"),
        ("/score", {"queries": "a", "documents": ["a", ""]}, "documents[1]"),
        ("/score", {"queries": "a", "documents": [["a"]]}, "documents[0]"),
        ("/score", {"queries": "a" * 5000, "documents": "a"}, "queries"),
        ("/score", {"queries": "a", "documents": "a", "top_n": 1}, "top_n"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": ["a"] * 2048}, "documents"),
        ("/rerank", {"query": ["a"], "documents": ["a"]}, "query"),
        ("/rerank", {"query": "a", "documents": [{"image": "a"}]}, "documents[0]"),
    ],
)
async def test_what_is_not_compared(
    path: str, body: dict[str, Any], param: str, checkpoint: tuple[Path, Any], tokenizer: Any
) -> None:
    async with serving(checkpoint[0], tokenizer, "mean") as client:
        refusal = await post(client, path, **body)
        assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, param)
        cut = {"queries": "a" * 5000, "documents": "a", "truncate_prompt_tokens": -1}
        assert (await post(client, "/score", **cut)).status_code == 200
