"""Streams through a gateway in front of real workers of a tiny model, which are cut, killed, stopped and replaced.

`python -m tests.tandem_gateway.chaos --streams 10000` is the long run (`make chaos`); the tests run the same for less.
Its last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
from tandem_api.launch import GatewayConfig, GatewayTimeouts, StoreLimits
from tandem_api.names import Role
from tandem_gateway.exchange.recovery import MAX_STALLS
from tandem_gateway.process.server import Server
from tandem_gateway.process.settings import Settings
from tandem_gateway.scheduling import Worker

from tests.tandem_worker.process.conftest import WorkerProcess, run_worker
from tests.tandem_worker.process.forking import Forker
from tests.tandem_worker.server.conftest import byte_level_tokenizer
from tests.tandem_worker.server.test_resume import KINDS, RESPONSES, merge

MODEL = "tiny"
MIXED = (
    "greedy", "seeded", "nucleus and penalties", "schema", "tools", "logprobs", "stop", "four choices", "prompts",
    "response with reasoning", "response with calls", "response with logprobs", "message", "message with calls",
)  # fmt: skip
"""Kinds of requests that take part, with several seeds each."""
SEEDS = 3
ANSWER_SECONDS = 120.0
LOGPROB_ERROR = 1e-3
FIRST_BYTES = 4000
"""Of an answer that are not cut: a request whose first event never comes is sent to two workers, and no more. And none
is cut more often than a stream moves without an event between: the end of a long response is one piece."""
_REQUEST_ID = re.compile(rb"\r\nx-request-id: ([^\r]+)", re.IGNORECASE)
BROKEN = (b'data: {"error"', b"event: error", b"event: response.failed")
Request = tuple[str, dict[str, Any]]


def build_model(folder: Path) -> Path:
    """A Llama of two layers with random weights, and the tokenizer that the kinds of requests are made for."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    ours = byte_level_tokenizer()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=ours.backend_tokenizer, **ours.settings.special_tokens)
    tokenizer.chat_template = str(ours.chat_template)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
        initializer_range=0.3, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def list_requests(seeds: int = SEEDS) -> list[Request]:
    """Answers of some seconds, so that they meet the faults."""
    requests: list[Request] = []
    for kind in MIXED:
        path, body = KINDS[kind]
        for seed in range(seeds):
            room = "max_output_tokens" if path == RESPONSES else "max_tokens"
            longer = {room: 150} if "ignore_eos" in body else {}
            requests.append((path, body | longer | {"seed": seed}))
    return requests


def read_answer(stream: bytes) -> dict[str, Any]:
    """What must be equal."""
    merged = merge(stream)
    assert len(merged["heads"]) == 1
    merged["heads"] = None
    merged["usage"].pop("prompt_tokens_details")
    return merged


def find_difference(one: Any, other: Any, path: str = "answer") -> str | None:
    """Where two answers differ. A step of one token and one of many add up in another order: logprobs may, a little."""
    if isinstance(one, float) and isinstance(other, float):
        return None if abs(one - other) < LOGPROB_ERROR else f"{path}: {one} and {other}"
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        found = (find_difference(one[key], other[key], f"{path}.{key}") for key in one)
        return next(filter(None, found), None)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        found = (find_difference(*pair, f"{path}[{index}]") for index, pair in enumerate(zip(one, other, strict=True)))
        return next(filter(None, found), None)
    return None if one == other else f"{path}: {one!r:.200} and {other!r:.200}"


class Cutter:
    """Between gateway and worker: passes bytes on, and breaks connections within a share of the answers."""

    def __init__(self, port: int, share: float, seed: int, cuts_of: Counter[bytes]) -> None:
        """`cuts_of`: of each request, by all cutters."""
        self._target = port
        self.share = share
        self.cuts = 0
        self._cuts_of = cuts_of
        self._random = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._carry(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back_reader, back_writer = await asyncio.open_connection("127.0.0.1", self._target)
        left, request = 1 << 60, b""

        async def forth() -> None:
            nonlocal left, request
            while data := await reader.read(1 << 16):
                if (found := _REQUEST_ID.search(data)) is not None:
                    request = found[1]
                cut = self._random.random() < self.share and self._cuts_of[request] < MAX_STALLS
                left = FIRST_BYTES + int(self._random.expovariate(1 / 8000)) if cut else 1 << 60
                back_writer.write(data)
                await back_writer.drain()

        async def back() -> None:
            nonlocal left
            while data := await back_reader.read(1 << 16):
                writer.write(data[:left])
                await writer.drain()
                left -= len(data)
                if left <= 0:
                    self.cuts += 1
                    self._cuts_of[request] += 1
                    return

        ways = [asyncio.create_task(way()) for way in (forth, back)]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            back_writer.transport.abort()


class Fleet:
    """A gateway in this process and workers that are processes, each behind a `Cutter`."""

    def __init__(self, folder: Path, model: Path, forker: Forker, *, drain_seconds: float = 0.3) -> None:
        self._forker = forker
        self._folder = folder
        self._model = model
        self._drain_seconds = drain_seconds
        self._stack = contextlib.ExitStack()
        self._number = 0
        self.workers: dict[str, WorkerProcess] = {}
        self.cutters: dict[str, Cutter] = {}
        self.share = 0.0
        """Of the answers of workers that are cut."""
        self.cuts = 0
        self._cuts_of: Counter[bytes] = Counter()
        self._server: Server | None = None

    async def start(self, count: int, response_store: StoreLimits | None, **timeouts: float) -> None:
        await asyncio.gather(*[self.add() for _ in range(count)])
        config = GatewayConfig(
            model_name=MODEL, served_name=MODEL, namespace="default", disaggregated=False, http_port=0, metrics_port=0,
            timeouts=GatewayTimeouts(**timeouts), response_store=response_store,
        )  # fmt: skip
        told = Settings(
            config=config, host="127.0.0.1", workers=tuple(self._list_workers()), workers_file=None,
            lame_duck_seconds=0.0, log_level="warning", access_log=False,
        )  # fmt: skip
        self._server = Server(told)
        await self._server.start()

    @property
    def gateway(self) -> Any:
        assert self._server is not None
        return self._server.gateway

    @property
    def reports(self) -> Any:
        assert self._server is not None
        return self._server.reports

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.http_port}"

    async def add(self) -> str:
        """Start a worker; returns its name when it is ready and known to the gateway."""
        self._number += 1
        name = f"decode-{self._number}"
        folder = self._folder / name
        folder.mkdir()
        options: dict[str, Any] = {"drainTimeoutSeconds": self._drain_seconds, "maxModelLen": 2048}
        running = run_worker(folder, "unified", self._model, forker=self._forker, **options)
        worker = await asyncio.to_thread(self._stack.enter_context, running)
        async with httpx.AsyncClient(timeout=60) as client, asyncio.timeout(150):
            while True:
                assert worker.process.poll() is None, worker.log.read_text()
                with contextlib.suppress(httpx.TransportError):
                    if (await client.get(f"{worker.metrics_url}/readyz")).status_code == 200:
                        break
                await asyncio.sleep(0.1)
        cutter = Cutter(int(worker.url.rpartition(":")[2]), self.share, self._number, self._cuts_of)
        await cutter.start()
        self.workers[name], self.cutters[name] = worker, cutter
        self.apply()
        return name

    def apply(self) -> None:
        if self._server is not None:
            self._server.apply_workers(self._list_workers())

    def _list_workers(self) -> list[Worker]:
        return [
            Worker(
                name=name,
                address=f"127.0.0.1:{cutter.port}",
                role=Role.UNIFIED,
                revision="r1",
            )
            for name, cutter in self.cutters.items()
        ]

    async def remove(self, name: str) -> None:
        """It has ended: as discovery does, tell the gateway a moment later."""
        cutter = self.cutters.pop(name)
        self.workers.pop(name)
        self.cuts += cutter.cuts
        self.apply()
        await cutter.stop()

    def set_share(self, share: float) -> None:
        self.share = share
        for cutter in self.cutters.values():
            cutter.share = share

    def busiest(self) -> str:
        endpoints = self.gateway.scheduler.endpoints
        return max(self.workers, key=lambda name: endpoints[name].requests)

    def streams_of(self, name: str) -> int:
        """Streams that have begun and come from this worker."""
        exchanges = self.gateway.exchanges
        return sum(each.first_byte_at > 0 and each.choice.decode.worker.name == name for each in exchanges)

    def send(self, name: str, number: int) -> None:
        self.workers[name].process.send_signal(number)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()
        for cutter in self.cutters.values():
            await cutter.stop()
        for worker in self.workers.values():
            with contextlib.suppress(ProcessLookupError):
                worker.process.send_signal(signal.SIGCONT)
        await asyncio.to_thread(self._stack.close)


@contextlib.asynccontextmanager
async def open_fleet(
    count: int, forker: Forker, *, response_store: StoreLimits | None = None, **timeouts: float
) -> AsyncIterator[Fleet]:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        await asyncio.to_thread(build_model, model)
        fleet = Fleet(Path(folder), model, forker)
        try:
            await fleet.start(count, response_store, **timeouts)
            yield fleet
        finally:
            await fleet.stop()


class Run:
    """Streams, and whether each is what it would be without any fault."""

    def __init__(self, fleet: Fleet, *, seeds: int = SEEDS) -> None:
        """`seeds`: of each kind of request so many."""
        self.fleet = fleet
        self.seeds = seeds
        self.requests = list_requests(seeds)
        self.expected: list[dict[str, Any]] = []
        self.results: Counter[str] = Counter()
        self.problems: list[str] = []

    async def learn(self) -> None:
        """The undisturbed answers, from a worker itself."""
        url = next(iter(self.fleet.workers.values())).url
        async with httpx.AsyncClient(timeout=ANSWER_SECONDS) as client:
            for path, body in self.requests:
                response = await client.post(url + path, json=body)
                assert response.status_code == 200, response.text
                self.expected.append(read_answer(response.content))

    async def stream(self, client: httpx.AsyncClient, number: int) -> None:
        index = number % len(self.requests)
        path, body = self.requests[index]
        result, detail = "right", ""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                response = await client.post(self.fleet.url + path, json=body)
            if response.status_code != 200:
                result, detail = f"status {response.status_code}", response.text
            elif any(mark in response.content for mark in BROKEN):
                result, detail = "broken", response.text[-300:]
            elif difference := find_difference(read_answer(response.content), self.expected[index]):
                result, detail = "wrong", difference
        except TimeoutError:
            result = "hung"
        except (httpx.HTTPError, AssertionError, KeyError) as error:
            result = f"failed: {type(error).__name__}"
        self.results[result] += 1
        if result != "right":
            kind = MIXED[index // self.seeds]
            self.problems.append(f"{number} ({kind}, seed {body['seed']}): {result} {detail}")

    async def run(self, count: int, at_once: int, *, until: Callable[[], bool] = lambda: False) -> None:
        """`count` streams, `at_once` of them side by side; fewer where `until` comes true before."""
        numbers = iter(range(count))
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=at_once)
        async with httpx.AsyncClient(timeout=ANSWER_SECONDS, limits=limits) as client:

            async def ask() -> None:
                for number in numbers:
                    await self.stream(client, number)
                    if until():
                        return

            await asyncio.gather(*[ask() for _ in range(at_once)])


async def disturb(fleet: Fleet, seconds: float, seed: int) -> Counter[str]:
    """One fault after another until cancelled: a worker is killed, told to end, or stops for a while."""
    done: Counter[str] = Counter()
    choice = random.Random(seed)
    try:
        while True:
            await asyncio.sleep(choice.uniform(0.5, 1.0) * seconds)
            name, what = fleet.busiest(), choice.choice(("kill", "end", "freeze"))
            done[what] += 1
            if what == "freeze":
                fleet.send(name, signal.SIGSTOP)
                await asyncio.sleep(choice.uniform(1, 6))
                fleet.send(name, signal.SIGCONT)
                continue
            fleet.send(name, signal.SIGKILL if what == "kill" else signal.SIGTERM)
            worker = fleet.workers[name]
            await asyncio.to_thread(worker.process.wait, 30)
            await fleet.remove(name)
            await fleet.add()
    except asyncio.CancelledError:
        return done


async def storm(streams: int, workers: int, at_once: int, every: float, share: float) -> dict[str, Any]:
    """The figures of one run."""
    with contextlib.closing(Forker()) as forker:
        return await _storm(forker, streams, workers, at_once, every, share)


async def _storm(
    forker: Forker, streams: int, workers: int, at_once: int, every: float, share: float
) -> dict[str, Any]:
    async with open_fleet(workers, forker, idle_seconds=3.0, first_token_seconds=20.0) as fleet:
        run = Run(fleet)
        await run.learn()
        fleet.set_share(share)
        began = time.monotonic()
        disturbing = asyncio.create_task(disturb(fleet, every, 1))
        await run.run(streams, at_once)
        disturbing.cancel()
        faults = await disturbing
        metrics = fleet.gateway.metrics
        return {
            "streams": sum(run.results.values()),
            "results": dict(run.results),
            "seconds": round(time.monotonic() - began, 1),
            "faults": dict(faults) | {"cut": fleet.cuts + sum(cutter.cuts for cutter in fleet.cutters.values())},
            "resumes": dict(metrics.resumes),
            "failed_resumes": dict(metrics.failed_resumes),
            "retries": dict(metrics.retries),
            "problems": run.problems[:20],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=40)
    parser.add_argument("--every", type=float, default=6.0, help="seconds between two faults, at most")
    parser.add_argument("--cut", type=float, default=0.1, help="share of the workers' answers that are cut")
    told = parser.parse_args()
    figures = asyncio.run(storm(told.streams, told.workers, told.at_once, told.every, told.cut))
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.exit(figures["results"] != {"right": told.streams})


if __name__ == "__main__":
    main()
