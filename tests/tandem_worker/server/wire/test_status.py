from __future__ import annotations

from types import SimpleNamespace

import httpx
import pytest
from tandem_api.names import Role
from tandem_api.telemetry import WorkerTelemetry
from tandem_worker.server.wire.status import StatusApp

TELEMETRY = WorkerTelemetry(
    model_name="tiny", role=Role.UNIFIED, revision="r1", pod="pod-0", draining=False, running_requests=0,
    queued_requests=0, running_tokens=0, queued_prefill_tokens=0, kv_blocks_used=0, kv_blocks_cached=0,
    kv_blocks_total=10, kv_eviction_horizon=0.0,
)  # fmt: skip


class Scene:
    def __init__(self) -> None:
        self.problems: list[str] = []
        self.phase: str | None = "loading weights"
        self.app = StatusApp(problems=lambda: self.problems, waits_for=lambda: self.phase)

    async def ask(self, path: str, method: str = "GET") -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://worker") as http:
            return await http.request(method, path)

    async def probe(self) -> list[tuple[int, str]]:
        answers = [await self.ask(path) for path in ("/healthz", "/readyz")]
        return [(answer.status_code, answer.text) for answer in answers]


@pytest.fixture
def scene() -> Scene:
    return Scene()


async def test_from_loading_to_serving(scene: Scene) -> None:
    assert await scene.probe() == [(200, "ok\n"), (503, "loading weights\n")]
    scene.phase = None
    assert await scene.probe() == [(200, "ok\n"), (200, "ok\n")]


async def test_problems_are_named_and_take_no_requests(scene: Scene) -> None:
    scene.phase, scene.problems = None, ["kv port 7000: is gone", "threads: there are none"]
    text = "kv port 7000: is gone\nthreads: there are none\n"
    assert await scene.probe() == [(500, text), (503, text)]
    scene.problems = []
    assert await scene.probe() == [(200, "ok\n"), (200, "ok\n")]


async def test_figures_come_when_there_are_any(scene: Scene) -> None:
    for path in ("/metrics", "/telemetry"):
        assert (await scene.ask(path)).status_code == 503
    scene.app.figures = SimpleNamespace(metrics_text=lambda: "tandem_worker_draining 0\n", telemetry=lambda: TELEMETRY)
    assert (await scene.ask("/metrics")).text == "tandem_worker_draining 0\n"
    assert (await scene.ask("/telemetry")).json()["pod"] == "pod-0"


@pytest.mark.parametrize("path", ["/", "/v1/models", "/v1/completions", "/debug", "/healthz/", "/metrics/../v1/models"])
async def test_nothing_else_is_here(scene: Scene, path: str) -> None:
    assert (await scene.ask(path)).status_code == 404


async def test_only_reading(scene: Scene) -> None:
    assert (await scene.ask("/healthz", "HEAD")).status_code == 200
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert (await scene.ask("/healthz", method)).status_code == 405
