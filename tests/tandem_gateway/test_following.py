"""A gateway in a cluster: its workers and its names come from one API server, and it runs on when that is gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from tandem_api.launch import GatewayConfig, GatewayRouting
from tandem_api.names import LABEL_REVISION, LABEL_ROLE
from tandem_gateway.process.server import Server
from tandem_gateway.process.settings import Settings
from tandem_gateway.workers.discovery.kube import ApiServer

PODS = "/api/v1/namespaces/ns/pods"
MODELS = "/apis/tandem.dev/v1alpha1/namespaces/ns/inferencemodels"


class ClusterServer:
    """Lists what is in `kept` by path, and sends what is put into `events` to whoever watches that path."""

    def __init__(self) -> None:
        self.kept: dict[str, list[dict[str, Any]]] = {PODS: [], MODELS: []}
        self.events = {path: asyncio.Queue[dict[str, Any]]() for path in self.kept}
        self.forbidden: set[str] = set()
        self.answers_models = asyncio.Event()
        self.answers_models.set()
        self.server: asyncio.Server
        self._writers: set[asyncio.StreamWriter] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            target = urlsplit((await reader.readuntil(b"\r\n\r\n")).decode().split(" ")[1])
            if target.path == MODELS:
                await self.answers_models.wait()
            if target.path in self.forbidden:
                writer.write(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 2\r\n\r\n{}")
            elif "watch" in parse_qs(target.query):
                writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
                while True:
                    line = json.dumps(await self.events[target.path].get()).encode() + b"\n"
                    writer.write(b"%x\r\n%b\r\n" % (len(line), line))
            else:
                body = json.dumps({"metadata": {"resourceVersion": "1"}, "items": self.kept[target.path]}).encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            writer.close()

    def stop(self) -> None:
        self.server.close()
        for writer in self._writers:
            writer.transport.abort()


def make_pod(worker: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": worker.name, "labels": {LABEL_ROLE: "unified", LABEL_REVISION: "r1"}},
        "status": {"podIP": "127.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]},
        "spec": {"containers": [{"ports": [{"name": "http", "containerPort": worker.port}]}]},
    }


def make_model(*names: str) -> dict[str, Any]:
    routing = GatewayRouting(served_names=list(names)).model_dump(by_alias=True)
    return {"metadata": {"name": "toy", "resourceVersion": "2"}, "status": {"routing": routing}}


@pytest.fixture
async def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[ClusterServer]:
    found = ClusterServer()
    found.server = await asyncio.start_server(found.serve, "127.0.0.1", 0)
    (tmp_path / "token").write_text("t")
    port = found.server.sockets[0].getsockname()[1]
    reach = ApiServer(host="127.0.0.1", port=port, ca=None, token=tmp_path / "token")
    monkeypatch.setattr(ApiServer, "in_cluster", lambda: reach)
    yield found
    found.stop()
    await asyncio.sleep(0.02)


@pytest.fixture
async def gateway(cluster: ClusterServer, start_worker: Any) -> AsyncIterator[Server]:
    cluster.kept[PODS] = [make_pod(await start_worker())]
    config = GatewayConfig(
        model_name="toy", served_name="launched", namespace="ns", disaggregated=False, http_port=0, metrics_port=0
    )
    server = Server(
        Settings(
            config=config, host="127.0.0.1", workers=(), workers_file=None, lame_duck_seconds=0.0, log_level="info",
            access_log=False,
        )
    )  # fmt: skip
    yield server
    await server.stop()


async def status_of(server: Server, model: str) -> int:
    async with httpx.AsyncClient(verify=False) as http:
        url = f"http://127.0.0.1:{server.http_port}/v1/completions"
        return (await http.post(url, json={"model": model, "prompt": "x", "max_tokens": 1}, timeout=10)).status_code


async def test_it_is_ready_with_the_names_of_the_status_and_keeps_them_without_the_api_server(
    cluster: ClusterServer, gateway: Server, until: Any
) -> None:
    cluster.kept[MODELS] = [make_model("new", "old")]
    cluster.answers_models.clear()
    await gateway.start()
    await until(lambda: gateway.admin.discovered)
    assert not gateway.admin.ready, "it would refuse a name that is served"
    cluster.answers_models.set()
    await until(lambda: gateway.admin.ready)
    statuses = [await status_of(gateway, name) for name in ("new", "old", "launched")]
    assert statuses == [200, 200, 404]
    cluster.events[MODELS].put_nowait({"type": "MODIFIED", "object": make_model("new")})
    await until(lambda: gateway.gateway.served_names == ("new",))
    cluster.stop()
    assert [await status_of(gateway, name) for name in ("new", "old")] == [200, 404]


async def test_where_it_may_not_see_its_model_it_goes_by_its_launch_configuration(
    cluster: ClusterServer, gateway: Server, until: Any
) -> None:
    cluster.forbidden = {MODELS}
    await gateway.start()
    await until(lambda: gateway.admin.ready)
    assert [await status_of(gateway, name) for name in ("launched", "new")] == [200, 404]
