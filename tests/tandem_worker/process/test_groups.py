"""A worker of several processes, from outside: answers, deaths, ends, and pods that start in any order."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

RESOLVER = """
import socket
known = socket.getaddrinfo
socket.getaddrinfo = lambda host, *rest, **kw: known("127.0.0.1" if host == "m-0.svc" else host, *rest, **kw)
"""
"""Stands in for the cluster's DNS: both pods are on this machine's loopback."""
TENSOR2 = {"group": {"parallelism": {"tensor": 2}}}
PROMPT = "The quick brown fox jumps over the lazy dog. " * 6


def ranks(process: subprocess.Popen[bytes]) -> list[int]:
    """Process ids of the ranks that it has started; processes for grammars and large requests are others."""
    threads = Path(f"/proc/{process.pid}/task").iterdir()
    children = [int(pid) for thread in threads for pid in (thread / "children").read_text().split()]
    return [pid for pid in children if b"tandem_worker.host.isolation" not in Path(f"/proc/{pid}/cmdline").read_bytes()]


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def termination_message(worker: Any) -> dict[str, str]:
    return json.loads(worker.log.with_suffix(".termination").read_text())


@pytest.mark.full
def test_a_killed_rank_takes_the_group_down_and_it_serves_again(
    workers: SimpleNamespace, tiny_model: Path, tmp_path: Path
) -> None:
    with workers.run(tmp_path, "unified", tiny_model) as single:
        expected = workers.await_ready(single).complete(PROMPT, max_tokens=24)["choices"][0]["text"]
    for attempt in range(2):
        with workers.run(tmp_path, "unified", tiny_model, **TENSOR2) as worker:
            workers.await_ready(worker)
            assert worker.complete(PROMPT, max_tokens=24)["choices"][0]["text"] == expected
            (follower,) = ranks(worker.process)
            if attempt:  # the second time it ends in order
                worker.process.send_signal(signal.SIGTERM)
                assert worker.process.wait(60) == 0
                assert not alive(follower)
                continue
            answer = kill_while_busy(workers, worker, follower)
            assert "lost a part of itself: rank 1 was killed by SIGKILL" in answer["error"]["message"]
            message = termination_message(worker)
            assert message["reason"] == "GroupLost"
            assert "rank 1 was killed by SIGKILL" in message["message"]


def kill_while_busy(workers: SimpleNamespace, worker: Any, pid: int) -> dict[str, Any]:
    """The answer to a request that is running when process `pid` is killed; the worker ends for it."""
    answer: dict[str, Any] = {}

    def ask() -> None:
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 7000, "ignore_eos": True}
        answer.update(httpx.post(worker.url + "/v1/completions", json=body, timeout=60).json())

    running = threading.Thread(target=ask)
    running.start()
    workers.eventually(lambda: worker.metric("tandem_worker_kv_blocks_used") > 0, 60, "the request runs")
    os.kill(pid, signal.SIGKILL)
    assert worker.process.wait(60) == 1
    running.join(60)
    return answer


@pytest.mark.full
def test_a_killed_leader_leaves_nobody_behind(workers: SimpleNamespace, tiny_model: Path, tmp_path: Path) -> None:
    with workers.run(tmp_path, "unified", tiny_model, **TENSOR2) as worker:
        workers.await_ready(worker)
        (follower,) = ranks(worker.process)
        worker.process.kill()
        worker.process.wait(60)
        workers.eventually(lambda: not alive(follower), 60, "the follower ends too")


@pytest.mark.full
@pytest.mark.parametrize(
    ("role", "changes", "reason", "words"),
    [
        ("unified", {"group": {"parallelism": {"tensor": 3}}}, "ParallelismInvalid", "4 attention heads"),
        ("unified", {"group": {"parallelism": {"tensor": 2}, "numNodes": 3}}, "GroupInvalid", "over 3 pods"),
        ("decode", {"group": {"parallelism": {"data": 2}}}, "GroupUnsupported", "leave out spec.prefill"),
        ("unified", TENSOR2 | {"kv": {"disk": {"sizeBytes": 1 << 30}}}, "GroupUnsupported", "leave out kv.disk"),
        ("unified", TENSOR2 | {"kv": {"store": {}}}, "GroupUnsupported", "leave out kv.store"),
        ("unified", TENSOR2 | {"kv": {"memoryBytes": 10}}, "KVCacheTooSmall", "10 bytes"),
    ],
)
def test_a_group_that_cannot_be_says_why(
    workers: SimpleNamespace,
    tiny_model: Path,
    tmp_path: Path,
    role: str,
    changes: dict[str, Any],
    reason: str,
    words: str,
) -> None:
    with workers.run(tmp_path, role, tiny_model, **changes) as worker:
        assert worker.process.wait(100) == 1
    message = termination_message(worker)
    assert message["reason"] == reason
    assert words in message["message"]


@pytest.mark.full
def test_two_pods_meet_again_after_one_has_died(workers: SimpleNamespace, tiny_model: Path, tmp_path: Path) -> None:
    port = workers.free_port()
    group = {"parallelism": {"pipeline": 2}, "numNodes": 2, "service": "svc", "port": port}
    (tmp_path / "sitecustomize.py").write_text(RESOLVER)

    def start(ordinal: int) -> Any:
        environment = {"POD_NAME": f"m-{ordinal}", "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
        return workers.run(tmp_path, "unified", tiny_model, environment=environment, group=group)

    with start(1) as follower:  # it starts first and waits
        workers.eventually(lambda: answers(follower, "/healthz"), 60, "the follower's probes answer")
        assert follower.get("/readyz").status_code == 503
        with start(0) as leader:
            workers.await_ready(leader)
            workers.await_ready(follower)
            first = leader.complete(PROMPT, max_tokens=16)["choices"][0]["text"]
            refused = httpx.post(follower.url + "/v1/completions", json={"model": "tiny", "prompt": "x"})
            assert (refused.status_code, refused.headers["x-tandem-retry"]) == (503, "1")
            assert "ask m-0" in refused.json()["error"]["message"]
            leader.process.send_signal(signal.SIGKILL)
            assert follower.process.wait(60) == 1
    assert "the leader is gone" in termination_message(follower)["message"]
    with start(0) as leader:
        with start(1) as follower:
            workers.await_ready(leader)
            assert leader.complete(PROMPT, max_tokens=16)["choices"][0]["text"] == first
            follower.process.send_signal(signal.SIGTERM)  # an evicted follower ends the group in order
            assert follower.process.wait(30) == 0
        assert leader.process.wait(60) == 0


def answers(worker: Any, path: str) -> bool:
    try:
        return worker.get(path).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.full
def test_groups_of_different_shapes_prefill_and_decode(
    workers: SimpleNamespace, tiny_model: Path, tmp_path: Path
) -> None:
    """Blocks are re-sliced from two stages to two tensor ranks on the way."""
    pipeline2 = {"group": {"parallelism": {"pipeline": 2}}}
    with (
        workers.run(tmp_path, "unified", tiny_model) as single,
        workers.run(tmp_path, "prefill", tiny_model, **pipeline2) as prefill,
        workers.run(tmp_path, "decode", tiny_model, **TENSOR2) as decode,
    ):
        for worker in (single, prefill, decode):
            workers.await_ready(worker)
        for length in (20, 150, 700):  # one chunk, several, and micro-batches
            prompt = [1 + 7 * index % 250 for index in range(length)]
            expected = single.complete(prompt, max_tokens=12)["choices"][0]["text"]
            answer = decode.complete(prompt, prefill=prefill.kv, max_tokens=12)
            assert answer["choices"][0]["text"] == expected
            assert answer["headers"]["x-tandem-prefill-worker"] == "prefill-0"
        workers.eventually(lambda: prefill.metric("tandem_worker_kv_blocks_used") == 0, 60, "blocks are released")
