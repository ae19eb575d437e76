"""A prefill and a decode process: the same tokens as one process, through every failure."""

from __future__ import annotations

import json
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from tests.tandem_worker.process.conftest import eventually

TEXT = "The quick brown fox jumps over the lazy dog. "
USED = "tandem_worker_kv_blocks_used"


def oracle(model: Path, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of transformers in float32."""
    from transformers import LlamaForCausalLM

    reference = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        tokens = reference.generate(
            torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
    return tokens[0, len(prompt) :].tolist()


def prefills(worker: Any, where: str) -> float:
    return worker.metric("tandem_worker_prefills_total", where=where)


def prompt_of(length: int, seed: int) -> list[int]:
    return torch.randint(1, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("length", [17, 32, 48, 129, 500])
def test_tokens_equal_transformers(pair: SimpleNamespace, length: int) -> None:
    prompt = prompt_of(length, seed=length)
    before = prefills(pair.decode, "remote")
    answer = pair.decode.complete(
        prompt, prefill=pair.prefill.kv, max_tokens=12, ignore_eos=True, return_token_ids=True
    )
    assert answer["choices"][0]["token_ids"] == oracle(pair.model, prompt, 12)
    assert answer["headers"]["x-tandem-prefill-worker"] == "prefill-0"
    assert prefills(pair.decode, "remote") == before + 1


def test_a_prompt_beside_streams_in_short_steps_gives_the_same_tokens(pair: SimpleNamespace) -> None:
    """As the gateway asks for while prefill workers are behind: with streams beside it, which keep going."""
    prompt, local = prompt_of(300, seed=8), prefills(pair.decode, "local")
    with ThreadPoolExecutor(2) as pool:
        streams = [
            pool.submit(pair.decode.complete, prompt_of(20, seed=900 + n), prefill=pair.prefill.kv, max_tokens=500,
                        ignore_eos=True, return_token_ids=True)
            for n in range(2)
        ]  # fmt: skip
        eventually(lambda: pair.decode.metric("tandem_worker_requests_running") == 2, 30, "both decode")
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(
            pair.decode.url + "/v1/completions", json=body | {"return_token_ids": True}, timeout=60,
            headers={"x-tandem-step-seconds": "0.000001"},
        )  # fmt: skip
        beside = [one.result()["choices"][0]["token_ids"][:200] for one in streams]
    assert answer.json()["choices"][0]["token_ids"] == oracle(pair.model, prompt, 8)
    assert answer.headers["x-tandem-prefill-worker"] == "decode-0"
    assert prefills(pair.decode, "local") == local + 1
    assert beside == [oracle(pair.model, prompt_of(20, seed=900 + n), 200) for n in range(2)]
    assert pair.decode.get("/telemetry").json()["keepsStepSeconds"] is True


def test_a_follow_up_turn_reports_cached_tokens(pair: SimpleNamespace) -> None:
    prompt = prompt_of(200, seed=1)
    first = pair.decode.complete(prompt, prefill=pair.prefill.kv)
    again = pair.decode.complete(prompt + prompt_of(100, seed=2), prefill=pair.prefill.kv)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 192


def test_what_the_prefill_worker_has_cached_counts(pair: SimpleNamespace) -> None:
    """The decode worker never saw this prefix; the prefill worker computed it for somebody else."""
    prompt = prompt_of(160, seed=3)
    pair.prefill.complete(prompt, max_tokens=1)
    answer = pair.decode.complete(prompt + [5] * 40, prefill=pair.prefill.kv)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 160


AT_ONCE: dict[str, dict[str, Any]] = {
    "one token": {"max_tokens": 1, "logprobs": 2},
    "one token of each choice": {"max_tokens": 1, "n": 3, "temperature": 1, "seed": 5},
    "the end": {"logit_bias": {"0": 100}, "n": 2},
    "an end that is kept": {"stop_token_ids": [66], "logit_bias": {"66": 100}, "include_stop_str_in_output": True},
    "a stop string": {"stop": ["a"], "logit_bias": {"66": 100}},
    "a grammar": {"guided_choice": ["b"], "n": 2},
    "a few tokens": {"max_tokens": 3, "logprobs": 1, "n": 2, "temperature": 1, "seed": 9, "presence_penalty": 1},
    "a prompt that is scored": {"max_tokens": 0, "echo": True, "logprobs": 1},
}


@pytest.mark.parametrize("kind", AT_ONCE)
def test_the_first_token_may_be_the_last(pair: SimpleNamespace, workers: SimpleNamespace, kind: str) -> None:
    """It goes out before the first step; the answer is the same as without a prefill worker."""
    prompt = prompt_of(70, seed=1000 + list(AT_ONCE).index(kind))  # no other test begins so
    options = {"return_token_ids": True} | AT_ONCE[kind]
    answer = pair.decode.complete(prompt, prefill=pair.prefill.kv, **options)
    alone = pair.decode.complete(prompt, **options)
    for one, other in zip(answer["choices"], alone["choices"], strict=True):
        scores, same = one.pop("logprobs"), other.pop("logprobs")
        assert one == other
        if scores is not None:
            assert scores["tokens"] == same["tokens"]
            assert scores["token_logprobs"] == pytest.approx(same["token_logprobs"], abs=1e-3)
    details = [each["usage"].pop("prompt_tokens_details")["cached_tokens"] for each in (answer, alone)]
    assert answer["usage"] == alone["usage"]
    assert details[0] == 0
    for worker in (pair.prefill, pair.decode):
        workers.eventually(lambda worker=worker: worker.metric(USED) == 0, 60, "no block is in use")


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_other_apis_tell_what_prefill_workers_had_cached(pair: SimpleNamespace, path: str) -> None:
    """And calls are made by a grammar where the template knows no tools; white space may be long."""
    text, schema = TEXT * 4, {"type": "object", "properties": {}, "additionalProperties": False}
    body: dict[str, Any]
    if path == "/v1/messages":
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 600, "tool_choice": {"type": "any"},
                "tools": [{"name": "f", "input_schema": schema}]}  # fmt: skip
    else:
        body = {"input": text, "max_output_tokens": 600, "tool_choice": "required", "parallel_tool_calls": False,
                "tools": [{"type": "function", "name": "f", "parameters": schema}]}  # fmt: skip
    body["cache_salt"] = path  # else they share what is cached
    remote = prefills(pair.decode, "remote")
    headers = pair.decode.headers | {"x-tandem-prefill": pair.prefill.kv}
    answers = [httpx.post(pair.decode.url + path, json=body, headers=headers, timeout=60).json() for _ in range(2)]
    assert prefills(pair.decode, "remote") > remote
    kinds = [[item["type"] for item in answer.get("output") or answer["content"]] for answer in answers]
    assert all(set(each) <= {"function_call", "tool_use"} and each for each in kinds)
    first, again = (answer["usage"] for answer in answers)
    if path == "/v1/messages":
        assert first["cache_read_input_tokens"] == 0
        assert again["cache_read_input_tokens"] + again["input_tokens"] == first["input_tokens"]
        assert again["cache_read_input_tokens"] > 100
    else:
        assert first["input_tokens_details"]["cached_tokens"] == 0
        assert again["input_tokens_details"]["cached_tokens"] > 100
        assert again["input_tokens"] == first["input_tokens"]


def test_nothing_stays_allocated(pair: SimpleNamespace, workers: SimpleNamespace) -> None:
    for seed in range(5):
        pair.decode.complete(prompt_of(100 + seed, seed=100 + seed), prefill=pair.prefill.kv, max_tokens=2)
    for worker in (pair.prefill, pair.decode):
        workers.eventually(lambda worker=worker: worker.metric(USED) == 0, 60, "no block is in use")


def test_both_ends_count_the_same_bytes(pair: SimpleNamespace) -> None:
    pair.decode.complete(prompt_of(64, seed=8), prefill=pair.prefill.kv, max_tokens=2)
    name = "tandem_worker_kv_transfer_bytes_total"
    assert pair.decode.metric(name, direction="received") == pair.prefill.metric(name, direction="sent") > 0


@pytest.mark.parametrize("length", [40, 1800])
def test_a_client_that_leaves_frees_blocks_on_both(
    pair: SimpleNamespace, workers: SimpleNamespace, length: int
) -> None:
    """The short prompt is decoding when the client leaves, the long one is still being computed elsewhere."""
    body = json.dumps(
        {
            "model": "tiny",
            "prompt": prompt_of(length, seed=length),
            "max_tokens": 4000,
            "ignore_eos": True,
            "stream": True,
        }
    )
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"x-tandem-prefill: {pair.prefill.kv}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    host, _, port = pair.decode.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall((head + body).encode())
        busy = pair.prefill if length > 1000 else pair.decode
        workers.eventually(lambda: busy.metric(USED) > 0, 60, "the request runs")
    for worker in (pair.decode, pair.prefill):
        workers.eventually(lambda worker=worker: worker.metric(USED) == 0, 60, "no block is in use")


def test_an_unreachable_prefill_worker_is_done_without(pair: SimpleNamespace) -> None:
    prompt = prompt_of(90, seed=9)
    before = prefills(pair.decode, "fallback")
    answer = pair.decode.complete(prompt, prefill="127.0.0.1:1", max_tokens=6, ignore_eos=True, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == oracle(pair.model, prompt, 6)
    assert answer["headers"]["x-tandem-prefill-worker"] == "decode-0"
    assert prefills(pair.decode, "fallback") == before + 1


@pytest.mark.full
def test_another_revision_is_done_without(pair: SimpleNamespace, workers: SimpleNamespace, tmp_path: Path) -> None:
    with workers.run(tmp_path, "prefill", pair.model, revision="r2") as other:
        workers.await_ready(other)
        answer = pair.decode.complete(prompt_of(70, seed=10), prefill=f"{other.kv}, {pair.prefill.kv}", max_tokens=2)
    assert answer["headers"]["x-tandem-prefill-worker"] == "prefill-0"


def test_killing_the_prefill_worker_mid_request(
    pair: SimpleNamespace, workers: SimpleNamespace, tmp_path: Path
) -> None:
    with workers.run(tmp_path, "prefill", pair.model, scheduler={"maxBatchTokens": 32}) as victim:
        workers.await_ready(victim)
        prompt, answer = prompt_of(3000, seed=11), {}
        before = prefills(pair.decode, "fallback")
        options = {"max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
        request = threading.Thread(
            target=lambda: answer.update(pair.decode.complete(prompt, prefill=victim.kv, **options))
        )
        request.start()
        workers.eventually(lambda: victim.metric(USED) > 0, 60, "the prefill worker computes")
        victim.process.send_signal(signal.SIGKILL)
        request.join(30)
    assert answer["choices"][0]["token_ids"] == oracle(pair.model, prompt, 6)
    assert prefills(pair.decode, "fallback") == before + 1


def test_a_draining_prefill_worker_finishes_its_prompts(
    pair: SimpleNamespace, workers: SimpleNamespace, tmp_path: Path
) -> None:
    with workers.run(tmp_path, "prefill", pair.model, scheduler={"maxBatchTokens": 32}) as leaving:
        workers.await_ready(leaving)
        answer: dict[str, Any] = {}
        request = threading.Thread(
            target=lambda: answer.update(
                pair.decode.complete(prompt_of(2500, seed=12), prefill=leaving.kv, max_tokens=2)
            )
        )
        request.start()
        workers.eventually(lambda: leaving.metric(USED) > 0, 60, "the prefill worker computes")
        leaving.process.send_signal(signal.SIGTERM)
        request.join(30)
        assert answer["headers"]["x-tandem-prefill-worker"] == "prefill-0"
        assert leaving.process.wait(60) == 0
