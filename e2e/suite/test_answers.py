"""Greedy tokens through gateway, prefill and decode pods are the ones transformers computes in float32."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel
from tandem_api import names
from tandem_api.telemetry import Metric

from e2e.model import find_model
from e2e.suite.fleet import Fleet, smollm2

BLOCK = 16
CHUNK = 2048  # spec.engine.maxBatchTokens by default
NEW_TOKENS = 12
TIE = 2e-4
"""Two logits closer than this are a tie that two summation orders may break differently; float32 noise is 1e-5."""
HALF_TIE = 0.5
"""The same for weights and sums rounded to bfloat16."""


@pytest.fixture
def oracle() -> tuple[Any, Any]:
    """Model and tokenizer of transformers, in float32."""
    return load_oracle()


@functools.cache
def load_oracle() -> tuple[Any, Any]:
    """Once in a lane, whichever of its files asks: it takes more than ten seconds of a core."""
    # Here, so that lanes without such tests do not spend the seconds that these imports take.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    gguf = find_model()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    return model.eval(), tokenizer


@pytest.fixture(scope="module")
def api(main: Fleet) -> Iterator[openai.OpenAI]:
    with main.openai("main") as client:
        yield client


_EXPECTED: dict[tuple[int, ...], tuple[list[int], list[float]]] = {}


def expected(model: Any, prompt: list[int], stop: set[int]) -> tuple[list[int], list[float]]:
    """Greedy continuation and, per step, the margin between the two best logits. Computed once per prompt."""
    key = tuple(prompt)
    if key not in _EXPECTED:
        _EXPECTED[key] = _compute(model, prompt, stop)
    return _EXPECTED[key]


def _compute(model: Any, prompt: list[int], stop: set[int]) -> tuple[list[int], list[float]]:
    import torch

    tokens, margins = [], []
    with torch.inference_mode():
        out = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        for _ in range(NEW_TOKENS):
            best = out.logits[0, -1].topk(2)
            tokens.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
            if tokens[-1] in stop:
                break
            out = model(torch.tensor([tokens[-1:]]), past_key_values=out.past_key_values, use_cache=True)
    return tokens, margins


def assert_same(got: list[int], oracle: tuple[Any, Any], prompt: list[int], tie: float = TIE) -> None:
    """`got` is the greedy continuation with its stop token; a proven tie ends the comparison."""
    model, tokenizer = oracle
    want, margins = expected(model, prompt, {tokenizer.eos_token_id})
    for position, (mine, theirs) in enumerate(zip(got, want, strict=False)):
        if mine != theirs and margins[position] < tie:
            return
        assert mine == theirs, f"token {position} of {got} differs from {want}, margin {margins[position]:.2g}"
    assert len(got) == len(want), (got, want)


def complete(api: openai.OpenAI, prompt: list[int], model: str = "main") -> tuple[list[int], Any]:
    response = api.completions.create(
        model=model, prompt=prompt, max_tokens=NEW_TOKENS, temperature=0, extra_body={"return_token_ids": True}
    )
    return token_ids(response.choices[0]), response.usage


def token_ids(choice: BaseModel) -> list[int]:
    """What the gateway says beside OpenAI's own fields."""
    assert choice.model_extra is not None
    return list(choice.model_extra["token_ids"])


def write(length: int, oracle: tuple[Any, Any]) -> list[int]:
    """A prompt of that many tokens, always the same."""
    rng = random.Random(length)
    text = "".join(rng.choice(WORDS) for _ in range(length + 8))
    return oracle[1](text)["input_ids"][:length]


def lengths() -> list[Any]:
    """Every boundary the engine has, and lengths in between; four long ones."""
    edges = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 8 * BLOCK, 8 * BLOCK + 1]
    around_chunk = [CHUNK - 1, CHUNK, CHUNK + 1, 3000]
    rng = random.Random(7)
    between = [rng.randrange(3, 420) for _ in range(14)]
    swept = [pytest.param(length, marks=pytest.mark.full) for length in between[4:]]
    return [*edges, *between[:4], *around_chunk, *swept]


@pytest.mark.parametrize("length", lengths())
def test_token_prompts(api: openai.OpenAI, oracle: tuple[Any, Any], length: int) -> None:
    prompt = write(length, oracle)
    got, usage = complete(api, prompt)
    assert usage.prompt_tokens == length
    assert_same(got, oracle, prompt)


WORDS = [
    " the", " river", " carries", " old", " stories", " from", " mountain", " villages", " to", " harbours", ".", ",",
    " where", " engineers", " build", " quiet", " machines", " 42", " and", " señor", " 東京", " друг", " 🙂", "\n",
]  # fmt: skip
CHATS = [
    "What is the capital of France? Answer in one sentence.",
    "¿Cuál es la capital de España?",
    "日本の首都はどこですか?",
    "Напиши одно предложение о море.",
    "Say hello with an emoji 👋🏽 and a combining é.",
    "List three prime numbers.",
    "Write a haiku about rain.",
    "Translate 'good morning' to German.",
    "def fibonacci(n):",
    "What is 17 + 25?",
    " leading and trailing spaces ",
    "A" * 300,
]


@pytest.mark.parametrize("text", CHATS, ids=range(len(CHATS)))
def test_chats_of_three_turns(api: openai.OpenAI, oracle: tuple[Any, Any], text: str) -> None:
    """Each turn sends the whole conversation, so later turns run on cached blocks."""
    _, tokenizer = oracle
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": text}]
    for turn in range(2):
        response = api.chat.completions.create(
            model="main",
            messages=messages,
            max_tokens=NEW_TOKENS,
            temperature=0,
            extra_body={"return_token_ids": True},
        )
        choice, usage = response.choices[0], response.usage
        assert usage is not None
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert usage.prompt_tokens == len(prompt)
        assert_same(token_ids(choice), oracle, prompt)
        if turn:
            details = usage.prompt_tokens_details
            assert details is not None
            assert details.cached_tokens is not None
            assert details.cached_tokens >= BLOCK
        messages += [
            {"role": "assistant", "content": choice.message.content},
            {"role": "user", "content": "Tell me more."},
        ]


@pytest.mark.parametrize("cached", [2 * BLOCK, 5 * BLOCK, 5 * BLOCK + 3])
def test_cached_prefixes_give_the_same_tokens(api: openai.OpenAI, oracle: tuple[Any, Any], cached: int) -> None:
    # Longer than a block: a shorter prompt is computed by the decode worker, whose cache the other cannot read.
    rng = random.Random(f"cached {cached}")
    prompt = oracle[1]("".join(rng.choice(WORDS) for _ in range(200)))["input_ids"][:160]
    first, _ = complete(api, prompt[:cached])
    again, _ = complete(api, prompt[:cached])
    assert first == again
    got, usage = complete(api, prompt)
    assert usage.prompt_tokens_details.cached_tokens == cached // BLOCK * BLOCK, usage
    assert_same(got, oracle, prompt)


def test_bfloat16(fleet: Fleet, oracle: tuple[Any, Any]) -> None:
    """What users get without saying anything; by the CPU kernels where the CPU is one for them."""
    import torch

    fleet.apply(smollm2("half", engine={"device": "CPU", "dtype": "BFloat16"}))
    fleet.wait_ready("half")
    with fleet.openai("half") as api:
        for length in (1, BLOCK, 5 * BLOCK + 3, 400):
            prompt = write(length, oracle)
            assert_same(complete(api, prompt, "half")[0], oracle, prompt, HALF_TIE)
        predicted = repeat_answer(api, "half")
    if torch.cpu.get_capabilities().get("avx512_bf16"):
        details = predicted.usage.completion_tokens_details
        assert details.accepted_prediction_tokens > 0
        assert count_saved_steps(fleet, "half") > 20, "guesses are on by default, and these are right"
        for pod in fleet.pods("half", "prefill") + fleet.pods("half", "decode"):
            log = fleet.cluster.kubectl("-n", fleet.namespace, "logs", pod["metadata"]["name"], "-c", "worker")
            assert "layers are made of the native backend" in log


def count_saved_steps(fleet: Fleet, model: str) -> float:
    """Guesses of its decode workers that were right."""
    total = 0.0
    for pod in fleet.pods(model, "decode"):
        path = fleet.path("pods", f"{pod['metadata']['name']}:{names.WORKER_METRICS_PORT}") + "/proxy/metrics"
        lines = fleet.kubernetes.request("GET", path).splitlines()
        total += sum(
            float(each.split()[-1]) for each in lines if each.startswith(Metric.WORKER_ACCEPTED_DRAFT_TOKENS_TOTAL)
        )
    return total


def repeat_answer(api: openai.OpenAI, model: str) -> Any:
    """A chat, and the same with its answer foreseen: they differ in how many tokens a step gave."""
    asked: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Tell me what the sea is made of."}]
    without = api.chat.completions.create(model=model, messages=asked, max_tokens=48, temperature=0)
    text = without.choices[0].message.content or ""
    predicted = api.chat.completions.create(
        model=model, messages=asked, max_tokens=48, temperature=0, prediction={"type": "content", "content": text}
    )
    assert predicted.choices[0].message.content == text
    assert predicted.usage is not None
    assert without.usage is not None
    assert predicted.usage.completion_tokens == without.usage.completion_tokens
    return predicted


def test_the_pair_that_served_is_named(main: Fleet, api: openai.OpenAI) -> None:
    """The answer came through both pods, not through one that did it all."""
    raw = api.chat.completions.with_raw_response.create(
        model="main",
        messages=[{"role": "user", "content": "Name the pods that served this, please, in a few careful words."}],
        max_tokens=4,
    )
    assert raw.headers["x-tandem-decode-worker"] in {p["metadata"]["name"] for p in main.pods("main", "decode")}
    assert raw.headers["x-tandem-prefill-worker"] in {p["metadata"]["name"] for p in main.pods("main", "prefill")}


def test_no_block_stays_in_use(main: Fleet) -> None:
    main.wait_blocks_free("main")
