"""The process from outside: why it cannot start, how it tells that it is starting, how it ends."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest


def termination_message(worker: Any) -> dict[str, str]:
    return json.loads(worker.log.with_suffix(".termination").read_text())


def test_a_missing_model_is_told_to_the_operator(workers: SimpleNamespace, tmp_path: Path) -> None:
    with workers.run(tmp_path, "unified", tmp_path / "absent") as worker:
        assert worker.process.wait(100) == 1
    message = termination_message(worker)
    assert message["reason"] == "ModelNotFound"
    assert str(tmp_path / "absent") in message["message"]
    assert not worker.logged("Traceback")


def test_a_configuration_that_is_not_valid(workers: SimpleNamespace, tmp_path: Path) -> None:
    with workers.run(tmp_path, "conductor", tmp_path) as worker:
        assert worker.process.wait(50) == 1
    message = termination_message(worker)
    assert message["reason"] == "InvalidConfig"
    assert "role" in message["message"]


def test_probes_answer_early_and_sigterm_drains(workers: SimpleNamespace, tiny_model: Path, tmp_path: Path) -> None:
    with workers.run(tmp_path, "unified", tiny_model, forker=None, drainTimeoutSeconds=0.1) as worker:
        seen: set[tuple[int, int]] = set()

        def probe() -> bool:
            try:
                health, ready = worker.get("/healthz").status_code, worker.get("/readyz").status_code
            except httpx.TransportError:
                return False
            seen.add((health, ready))
            return ready == 200

        workers.eventually(probe, 150, "ready")
        assert seen == {(200, 503), (200, 200)}
        assert worker.get("/telemetry").json()["draining"] is False
        answer: dict[str, Any] = {}
        options = {"max_tokens": 900, "ignore_eos": True}
        request = threading.Thread(target=lambda: answer.update(worker.complete("hello", **options)))
        request.start()
        workers.eventually(lambda: worker.metric("tandem_worker_kv_blocks_used") > 0, 60, "the request runs")
        (config,) = tmp_path.glob("unified-*.json")  # as the kubelet refreshes it: read when it is needed
        config.write_text(json.dumps(json.loads(config.read_text()) | {"drainTimeoutSeconds": 120}))
        worker.process.send_signal(signal.SIGTERM)
        workers.eventually(lambda: worker.get("/readyz").text == "draining\n", 60, "draining")
        refused = httpx.post(worker.url + "/v1/completions", json={"model": "tiny", "prompt": "late"}, verify=False)
        assert (refused.status_code, refused.headers["x-tandem-retry"]) == (503, "1")
        assert worker.process.wait(120) == 0  # with its last stream
        request.join(60)
    assert answer["usage"]["completion_tokens"] == 900
    assert not worker.logged('"level":"error"')


def test_a_target_for_first_tokens_is_followed(workers: SimpleNamespace, tiny_model: Path, tmp_path: Path) -> None:
    with workers.run(tmp_path, "unified", tiny_model) as worker:
        workers.await_ready(worker)
        (config,) = tmp_path.glob("unified-*.json")
        text = config.read_text()
        response = httpx.post(
            worker.url + "/v1/responses", json={"model": "tiny", "input": "x", "max_output_tokens": 4}
        )
        assert response.json()["top_p"] == 0.97, "the model's own, where a request does not say"
        for target in ({"seconds": 0.5, "secondsPerToken": 0.001}, None):
            config.write_text(json.dumps(json.loads(text) | ({"ttftTarget": target} if target else {})))
            told = '"target":"{' if target else '"target":null'
            workers.eventually(lambda told=told: worker.logged(told), 60, f"the target is {target}")
            assert worker.complete("hello", max_tokens=4)["usage"]["completion_tokens"] == 4
    assert not worker.logged('"level":"error"')


@pytest.mark.full
def test_a_second_sigterm_ends_at_once(workers: SimpleNamespace, tiny_model: Path, tmp_path: Path) -> None:
    with workers.run(tmp_path, "unified", tiny_model) as worker:
        workers.await_ready(worker)
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 7000, "n": 8, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", worker.url + "/v1/completions", json=body, timeout=30) as answer:
            next(answer.iter_lines())
            worker.process.send_signal(signal.SIGTERM)
            workers.eventually(lambda: worker.get("/readyz").status_code == 503, 60, "draining")
            worker.process.send_signal(signal.SIGTERM)
            assert worker.process.wait(60) == 1


def test_a_worker_that_ends_leaves_its_blocks_on_its_disk(
    workers: SimpleNamespace, tiny_model: Path, tmp_path: Path
) -> None:
    """Whether the next one loads them, or computes because that is sooner, is a matter of the machine; it has them."""
    kv = {"memoryBytes": 32 << 20, "disk": {"path": str(tmp_path / "disk"), "sizeBytes": 64 << 20}}
    prompt = " ".join(f"word {number}" for number in range(60))
    told: list[str] = []
    for turn in range(2):
        with workers.run(tmp_path, "unified", tiny_model, kv=kv) as worker:
            workers.await_ready(worker)
            for _ in range(300):
                if worker.metric("tandem_worker_kv_tier_ready") == 1:
                    break
                time.sleep(0.1)
            assert (worker.metric("tandem_worker_kv_tier_stored_tokens") > 100) is (turn == 1)
            told.append(worker.complete(prompt)["choices"][0]["text"])
            worker.process.send_signal(signal.SIGTERM)
            assert worker.process.wait(60) == 0
    assert told[0] == told[1]
