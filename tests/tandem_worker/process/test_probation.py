"""A gateway's probe over real workers: blocks that arrive, and blocks that cannot."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from tandem_api.names import Role
from tandem_gateway.scheduling import Worker
from tandem_gateway.workers.probation import Probation


def decode_worker(worker: Any) -> Worker:
    address = worker.url.removeprefix("http://")
    return Worker(name="decode-0", address=address, role=Role.DECODE, revision="r1")


async def reason_of(worker: Worker, peer: Worker) -> str | None:
    probation = Probation(lambda workers: None, served_name="tiny", token_line=lambda: b"", connect_seconds=2.0)
    return await probation._ask(worker, peer)


def test_blocks_reach_the_worker_or_the_probe_says_not(pair: SimpleNamespace, workers: SimpleNamespace) -> None:
    peer = Worker(name="prefill-0", address="127.0.0.1:1", role=Role.PREFILL, revision="r1", kv_address=pair.prefill.kv)
    assert asyncio.run(reason_of(decode_worker(pair.decode), peer)) is None
    blocked = Worker(
        name="prefill-0", address="127.0.0.1:1", role=Role.PREFILL, revision="r1",
        kv_address=f"127.0.0.1:{workers.free_port()}",
    )  # fmt: skip
    said = asyncio.run(reason_of(decode_worker(pair.decode), blocked))
    assert said == "the prompt was to come from prefill-0, and came from decode-0"
