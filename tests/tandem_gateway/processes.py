"""The gateway as a process of its own, and workers that are processes, too."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
from tandem_api.launch import GatewayConfig

from tests.ports import free_port


class Process:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.http_port = self.https_port = self.metrics_port = 0

    async def wait_listening(self) -> None:
        assert self.process.stderr is not None
        async with asyncio.timeout(60):
            while line := await self.process.stderr.readline():
                event = json.loads(line)
                if event["message"] == "listening":
                    self.http_port, self.https_port = event.get("http_port", 0), event.get("https_port", 0)
                    self.metrics_port = event["metrics_port"]
                    return
        raise AssertionError("the process ended")

    async def probe(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient() as client:
            return await client.get(f"http://127.0.0.1:{self.metrics_port}{path}")

    async def probe_until(self, path: str, status: int) -> bool:
        async with asyncio.timeout(30):
            while (await self.probe(path)).status_code != status:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        return True

    async def refuses(self, connect: Callable) -> bool:
        """Wait until no more connections are accepted."""
        async with asyncio.timeout(30):
            while True:
                try:
                    await connect(self.http_port)
                except ConnectionRefusedError:
                    return True
                await asyncio.sleep(0.05)

    @property
    def cpu_seconds(self) -> float:
        """Computed by the event loop's thread so far."""
        return int(Path(f"/proc/{self.process.pid}/schedstat").read_text().split()[0]) / 1e9

    @property
    def rss_mib(self) -> float:
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) / 1024
        raise AssertionError("no VmRSS")


@pytest.fixture
async def launch(tmp_path: Path) -> AsyncIterator[Callable]:
    started: list[Process] = []

    async def start(*arguments: str, **config: object) -> Process:
        path = tmp_path / "config.json"
        fixed = {"namespace": "ns", "disaggregated": False, "http_port": 0, "metrics_port": 0}
        told = GatewayConfig(model_name="toy", served_name="toy", **fixed, **config)
        path.write_text(told.to_json())
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tandem_gateway", "--config", str(path), "--host", "127.0.0.1", *arguments,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        started.append(Process(process))
        await started[-1].wait_listening()
        return started[-1]

    yield start
    for item in started:
        if item.process.returncode is None:
            item.process.kill()
        await item.process.communicate()


@pytest.fixture
async def launch_worker() -> AsyncIterator[Callable]:
    """Starts a worker that is a process, and returns it with its port."""
    started: list[asyncio.subprocess.Process] = []

    async def start(port: int = 0) -> tuple[asyncio.subprocess.Process, int]:
        script = Path(__file__).with_name("worker_process.py")
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(script), str(port or free_port()), stdout=subprocess.PIPE
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None
        async with asyncio.timeout(60):
            return process, int(await process.stdout.readline())

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
        await process.wait()
