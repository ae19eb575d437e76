"""A prefill and a decode process whose blocks go through Mooncake's Transfer Engine, over its TCP on loopback."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.mooncake.library import plan_environment
from tests.tandem_worker.process.test_disaggregated import USED, oracle, prefills, prompt_of

MOONCAKE = {"memoryBytes": 32 << 20, "transport": "Mooncake"}
PORTS = {"MC_MIN_RPC_PORT": "28000", "MC_MAX_RPC_PORT": "29900"}
"""Apart from those that tests give to workers."""


@pytest.fixture(scope="module")
def pair(
    workers: SimpleNamespace,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    module_on_loopback_alone: None,
) -> Iterator[SimpleNamespace]:
    folder, around = tmp_path_factory.mktemp("mooncake"), plan_environment() | PORTS

    def run(role: str) -> Any:
        return workers.run(folder, role, tiny_model, environment=around, kv=MOONCAKE, scheduler={"maxBatchTokens": 64})

    with run("prefill") as prefill, run("decode") as decode:
        yield SimpleNamespace(
            prefill=workers.await_ready(prefill), decode=workers.await_ready(decode), model=tiny_model, run=run
        )


@pytest.mark.parametrize("length", [17, 48, 129, 500])
def test_tokens_equal_transformers(pair: SimpleNamespace, length: int) -> None:
    prompt = prompt_of(length, seed=length)
    before = prefills(pair.decode, "remote")
    answer = pair.decode.complete(
        prompt, prefill=pair.prefill.kv, max_tokens=12, ignore_eos=True, return_token_ids=True
    )
    assert answer["choices"][0]["token_ids"] == oracle(pair.model, prompt, 12)
    assert answer["headers"]["x-tandem-prefill-worker"] == "prefill-0"
    assert prefills(pair.decode, "remote") == before + 1


def test_both_workers_say_what_moves_their_blocks(pair: SimpleNamespace) -> None:
    pair.decode.complete(prompt_of(100, seed=1), prefill=pair.prefill.kv)
    for worker in (pair.prefill, pair.decode):
        told = worker.get("/telemetry").json()["kvTransport"]
        assert (told["wanted"], told["transport"], told["protocol"], told["fallback"]) == (
            "Mooncake", "Mooncake", "tcp", "",
        )  # fmt: skip
        assert told["bytesPerSecond"] > 0
        assert worker.metric("tandem_worker_kv_transport_bytes_total", transport="Mooncake") > 0
        assert worker.metric("tandem_worker_kv_transport_fallback") == 0


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)])
def test_a_prefill_worker_that_is_lost_costs_time_not_the_request(
    pair: SimpleNamespace, workers: SimpleNamespace, how: signal.Signals
) -> None:
    with pair.run("prefill") as victim:
        workers.await_ready(victim)
        prompt, answer = prompt_of(3000, seed=int(how)), {}
        before = prefills(pair.decode, "fallback")
        options = {"max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
        request = threading.Thread(
            target=lambda: answer.update(pair.decode.complete(prompt, prefill=victim.kv, **options))
        )
        request.start()
        workers.eventually(lambda: victim.metric(USED) > 0, 60, "the prefill worker computes")
        victim.process.send_signal(how)
        request.join(60)
        if how is signal.SIGSTOP:  # it may still write: what it may write to stays apart
            assert pair.decode.metric("tandem_worker_kv_slots_held") == 1
    assert answer["choices"][0]["token_ids"] == oracle(pair.model, prompt, 6)
    assert prefills(pair.decode, "fallback") == before + 1
    workers.eventually(
        lambda: pair.decode.metric("tandem_worker_kv_slots_held") == 0, 60, "its slots serve others again"
    )
    for worker in (pair.prefill, pair.decode):
        workers.eventually(lambda worker=worker: worker.metric(USED) == 0, 60, "no block is in use")


def test_a_peer_without_it_is_named_and_never_used_in_silence(
    pair: SimpleNamespace, workers: SimpleNamespace, tmp_path: Path
) -> None:
    prompt, before = prompt_of(90, seed=4), prefills(pair.decode, "fallback")
    with workers.run(tmp_path, "prefill", pair.model, environment=plan_environment()) as plain:
        workers.await_ready(plain)
        answer = pair.decode.complete(prompt, prefill=plain.kv, max_tokens=6, ignore_eos=True, return_token_ids=True)
        assert plain.metric("tandem_worker_kv_transfer_bytes_total", direction="sent") == 0
    assert answer["choices"][0]["token_ids"] == oracle(pair.model, prompt, 6)
    assert prefills(pair.decode, "fallback") == before + 1
    told = pair.decode.get("/telemetry").json()["kvTransport"]
    assert told["fallback"] == "prefill-0 does not offer Mooncake"
    assert pair.decode.metric("tandem_worker_kv_transport_fallback") == 1
    pair.decode.complete(prompt_of(90, seed=5), prefill=pair.prefill.kv)
    assert pair.decode.metric("tandem_worker_kv_transport_fallback") == 0


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_thousand_prompts_through_cancels_kills_and_a_freeze(
    pair: SimpleNamespace, workers: SimpleNamespace, tmp_path: Path
) -> None:
    """Same tokens as a worker that computes alone, and nothing stays out."""
    count, rng = 1000, random.Random(33)
    prompts = [prompt_of(rng.randrange(17, 200), seed=10_000 + number) for number in range(count)]
    cancelled = set(rng.sample(range(count), count // 10))
    options = {"max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
    answers: dict[int, list[int]] = {}
    remote = prefills(pair.decode, "remote")

    def ask(number: int, prefill: str) -> None:
        if number not in cancelled:
            answer = pair.decode.complete(prompts[number], prefill=prefill, **options)
            answers[number] = answer["choices"][0]["token_ids"]
            return
        body = {"model": "tiny", "prompt": prompts[number], "max_tokens": 500, "stream": True, "ignore_eos": True}
        with contextlib.suppress(httpx.TransportError):
            httpx.post(
                pair.decode.url + "/v1/completions", json=body, headers={"x-tandem-prefill": prefill},
                timeout=httpx.Timeout(30, read=0.001 + 0.03 * (number % 5)),
            )  # fmt: skip

    with ThreadPoolExecutor(4) as pool:
        for first in range(0, count, 250):
            with pair.run("prefill") as victim:
                workers.await_ready(victim)
                asked = [pool.submit(ask, number, victim.kv) for number in range(first, first + 250)]
                if first == 500:
                    asked[100].result()
                    victim.process.send_signal(signal.SIGSTOP)
                    time.sleep(2)
                    victim.process.send_signal(signal.SIGCONT)
                asked[200].result()
                victim.process.send_signal(signal.SIGKILL)
                for one in asked:
                    one.result()
    assert prefills(pair.decode, "remote") - remote > count / 2
    for worker in (pair.prefill, pair.decode):
        workers.eventually(lambda worker=worker: worker.metric(USED) == 0, 60, "no block is in use")
    workers.eventually(lambda: pair.decode.metric("tandem_worker_kv_slots_held") == 0, 60, "all slots are back")
    with workers.run(tmp_path, "unified", pair.model) as alone:
        workers.await_ready(alone)
        with ThreadPoolExecutor(4) as pool:
            expected = pool.map(
                lambda number: alone.complete(prompts[number], **options)["choices"][0]["token_ids"], sorted(answers)
            )
            assert dict(zip(sorted(answers), expected, strict=True)) == answers
    assert len(answers) == count - len(cancelled)
