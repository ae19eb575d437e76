"""A worker on standby: what it holds, what wakes it, and that it serves at once."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.types import Message
from tandem_api.launch import GatewayConfig, GatewayQueue
from tandem_gateway.process.server import Server
from tandem_gateway.process.settings import Settings
from tandem_gateway.workers.discovery.kube import ApiServer
from tandem_worker.process import serving
from tandem_worker.process import standby as module
from tandem_worker.process.progress import StartProgress, Switches
from tandem_worker.process.staging import StagedApp
from tandem_worker.process.standby import Standby, WakeDoor

MIB = 1 << 20


class Scene:
    """A start that has come to the place where it waits."""

    def __init__(self, *, is_ordered: Callable[[], bool] = lambda: True) -> None:
        self.now = 10.0
        self.progress = StartProgress(lambda: self.now)
        self.woken = 0
        self.standby = Standby(self.progress, is_ordered, self._count)
        self.switches = Switches()
        self.door = WakeDoor(StagedApp(lambda: self.progress.phase), self.standby, self.switches)
        self.step = threading.Thread(target=self.standby.wait, daemon=True)

    def _count(self) -> None:
        self.woken += 1

    def reach(self) -> None:
        self.step.start()
        until = time.monotonic() + 10
        while not self.standby.reached:
            assert time.monotonic() < until
            time.sleep(0.001)

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.door), base_url="http://worker")

    def serve(self) -> None:
        self.progress.be_ready()
        self.switches.ready = True
        self.door.open()


async def test_an_order_is_answered_once_requests_are_taken() -> None:
    scene = Scene()
    scene.now += 2
    scene.reach()
    scene.now += 3600
    async with scene.client() as http:
        orders = [asyncio.create_task(http.post("/wake")) for _ in range(3)]
        await asyncio.to_thread(scene.step.join, 10)
        assert not any(order.done() for order in orders), "it loads"
        scene.now += 0.75
        scene.serve()
        assert {(await order).status_code for order in orders} == {200}
        assert (await http.post("/wake")).status_code == 200, "it may be asked again"
        assert (await http.get("/wake")).status_code == 405
        scene.switches.draining = True
        late = await http.post("/wake")
        assert (late.status_code, late.headers["x-tandem-retry"]) == (503, "1")
    assert scene.woken == 1
    found = scene.progress.figure()
    assert found is not None
    assert (found.seconds, found.origin) == (0.75, "standby")
    seconds = scene.progress.seconds()
    assert (seconds["total"], seconds["wake"]) == (2.75, 0.75), "the hour does not count"


async def test_who_asks_and_leaves_holds_nothing() -> None:
    scene = Scene()

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        raise AssertionError(message)

    await scene.door({"type": "http", "method": "POST", "path": "/wake"}, receive, send)
    await asyncio.sleep(0.01)  # in which what was cancelled ends
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    scene.standby.wait()
    assert not scene.standby.reached, "its order holds, and came before there was anything to wait for"


def test_an_order_that_is_lost_is_in_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    ordered = [True]
    scene = Scene(is_ordered=lambda: ordered[0])
    scene.reach()
    scene.step.join(0.1)
    assert scene.step.is_alive()
    ordered[0] = False
    scene.step.join(60)
    assert not scene.step.is_alive()


def resident(worker: Any) -> float:
    """MiB."""
    text = Path(f"/proc/{worker.process.pid}/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0]) / 1024


def test_a_standby_wakes_and_serves(workers: SimpleNamespace, tiny_model: Path, tmp_path: Path) -> None:
    """As a process: probes, the door, the first token; and an end within a second while it waits."""
    with workers.run(tmp_path, "unified", tiny_model, standby=True) as worker:
        workers.eventually(lambda: is_resting(worker), 150, "the worker is on standby")
        assert worker.get("/readyz").text == "on standby until a request comes\n"
        assert worker.get("/healthz").status_code == 200
        refused = httpx.post(worker.url + "/v1/completions", json={"model": "tiny", "prompt": "early"})
        assert (refused.status_code, refused.headers["x-tandem-retry"]) == (503, "1")
        assert not worker.logged("loading weights")
        began = time.monotonic()
        assert httpx.post(worker.url + "/wake", timeout=60).status_code == 200
        assert worker.complete("hello", max_tokens=1)["usage"]["completion_tokens"] == 1
        print(f"from the order to the first token: {time.monotonic() - began:.2f} s")
        assert worker.get("/readyz").status_code == worker.get("/startz").status_code == 200
        told = worker.get("/telemetry").json()
        assert told["startFrom"] == "standby"
        assert worker.metric("tandem_worker_start_seconds", step="wake") == told["startSeconds"]
        json_schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
        answer = worker.complete("a number: ", max_tokens=4, response_format=json_schema)
        assert answer["choices"][0]["text"].strip("-").isdigit(), "grammars come as they are needed"
    again = tmp_path / "again"
    again.mkdir()
    with workers.run(again, "unified", tiny_model, standby=True) as worker:
        workers.eventually(lambda: is_resting(worker), 150, "the worker is on standby")
        (config,) = again.glob("*.json")
        config.write_text(json.dumps(json.loads(config.read_text()) | {"standby": False}))
        workers.await_ready(worker)
        config.write_text(json.dumps(json.loads(config.read_text()) | {"standby": True}))
        assert worker.complete("hello", max_tokens=1)["usage"]["completion_tokens"] == 1


def test_sigterm_ends_a_standby_at_once(workers: SimpleNamespace, tiny_model: Path, tmp_path: Path) -> None:
    with workers.run(tmp_path, "decode", tiny_model, standby=True) as worker:
        workers.eventually(lambda: is_resting(worker), 150, "the worker is on standby")
        worker.process.send_signal(signal.SIGTERM)
        assert worker.process.wait(30) == -signal.SIGTERM, "it does not serve, so the kernel ends it"


def is_resting(worker: Any) -> bool:
    assert worker.process.poll() is None, worker.log.read_text()
    try:
        return worker.get("/startz").status_code == 200
    except httpx.TransportError:
        return False


class Pods:
    """An API server that has some pods and never anything new: nobody looks at their probes."""

    def __init__(self, *pods: dict[str, Any]) -> None:
        self._list = {"metadata": {"resourceVersion": "1"}, "items": list(pods)}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        if "watch" in target:
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            await reader.read()
        else:
            body = json.dumps(self._list if "/pods" in target else {"metadata": {}, "items": []}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        writer.close()


def describe_pod(worker: Any, role: str) -> dict[str, Any]:
    """A pod that has started and is not ready."""
    ports = {"http": worker.url, "metrics": worker.metrics_url, "kv": worker.kv}
    listed = [{"name": name, "containerPort": int(at.rpartition(":")[2])} for name, at in ports.items()]
    labels = {"tandem.dev/model": "tiny", "tandem.dev/role": role, "tandem.dev/revision": "r1"}
    return {
        "metadata": {"name": f"tiny-{role}-0", "uid": f"uid-{role}", "resourceVersion": "1", "labels": labels},
        "spec": {"containers": [{"name": "worker", "ports": listed}]},
        "status": {"podIP": "127.0.0.1", "conditions": [], "containerStatuses": [{"started": True, "ready": False}]},
    }


async def ask_through_gateway(pods: Pods, monkeypatch: pytest.MonkeyPatch) -> httpx.Response:
    """The answer to the first request of a model whose workers are all on standby, without operator and kubelet."""
    api = await asyncio.start_server(pods.serve, "127.0.0.1", 0)
    where = ApiServer(host="127.0.0.1", port=api.sockets[0].getsockname()[1], ca=None, token=None)
    monkeypatch.setattr(ApiServer, "in_cluster", lambda: where)
    config = GatewayConfig(
        model_name="tiny", served_name="tiny", namespace="n", disaggregated=True, http_port=0, metrics_port=0,
        queue=GatewayQueue(wakes=True),
    )  # fmt: skip
    gateway = Server(
        Settings(
            config=config, host="127.0.0.1", workers=(), workers_file=None, lame_duck_seconds=0.0, log_level="info",
            access_log=False,
        )
    )  # fmt: skip
    await gateway.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.http_port}", timeout=120, verify=False) as http:
        body = {"model": "tiny", "prompt": "hello " * 20, "max_tokens": 1}
        answer = await http.post("/v1/completions", json=body)
    await gateway.stop()
    api.close()
    await asyncio.sleep(0.1)  # in which what was closed ends
    return answer


def test_a_request_wakes_both_roles_through_the_gateway(
    workers: SimpleNamespace, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is answered before anybody has looked at a probe."""
    run = workers.run
    with (
        run(tmp_path, "prefill", tiny_model, standby=True) as one,
        run(tmp_path, "decode", tiny_model, standby=True) as other,
    ):
        for worker in (one, other):
            workers.eventually(lambda worker=worker: is_resting(worker), 150, "the worker is on standby")
        pods = Pods(describe_pod(one, "prefill"), describe_pod(other, "decode"))
        answer = asyncio.run(ask_through_gateway(pods, monkeypatch))
        assert answer.status_code == 200, answer.text
        print(f"from the request to its answer: {answer.headers['x-tandem-queue-seconds']} s of waiting")
        assert answer.headers["x-tandem-decode-worker"] == "decode-0"
        workers.eventually(lambda: one.get("/readyz").status_code == 200, 120, "the prefill worker was woken, too")


@pytest.mark.parametrize("ready", [False, True])
def test_a_wake_that_hangs_ends_the_process(monkeypatch: pytest.MonkeyPatch, ready: bool) -> None:
    """With a reason and a sentence; one that is over is left alone."""
    ended: list[tuple[object, ...]] = []
    monkeypatch.setattr(serving, "end_process", lambda *told: ended.append(told))
    process = SimpleNamespace(
        _switches=Switches(ready=ready), _progress=SimpleNamespace(phase="loading weights"), _pod="pod"
    )
    serving.ServingProcess._end_late_wake(process)  # type: ignore[arg-type]
    text = "The worker was woken 900 s ago and is still loading weights."
    assert ended == ([] if ready else [("pod", "WakeTimedOut", text)])


@pytest.mark.full
def test_a_standby_whose_weights_are_gone_ends_with_the_reason(
    workers: SimpleNamespace, tiny_model: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    with workers.run(tmp_path, "decode", model, standby=True) as worker:
        workers.eventually(lambda: is_resting(worker), 150, "the worker is on standby")
        for weights in model.glob("*.safetensors"):
            weights.unlink()
        answer = httpx.post(worker.url + "/wake", timeout=60)
        assert answer.status_code == 503, (answer.status_code, answer.text, worker.log.read_text()[-3000:])
        assert worker.process.wait(60) == 1
    (termination,) = tmp_path.glob("*.termination")
    assert json.loads(termination.read_text())["reason"] == "WeightsNotFound"
