"""What reading workers' telemetry costs a gateway, and how large its report to the operator is.

    python -m bench.gateway.telemetry [--seconds 10]

The workers are one server in a process of its own. CPU is that of the reading process alone, without requests.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from multiprocessing.connection import Connection

import uvloop
from tandem_api.names import Role
from tandem_api.telemetry import WorkerTelemetry
from tandem_gateway.process.server import Server
from tandem_gateway.process.settings import parse_settings
from tandem_gateway.scheduling import Worker

FLEETS = (64, 1000)
REPORTS = 5
SAMPLE = WorkerTelemetry(
    model_name="meta-llama/Llama-3.3-70B-Instruct", role=Role.DECODE, revision="5f2c9d7e81",
    pod="llama-70b-production-decode-123", draining=False, running_requests=211, queued_requests=17,
    running_tokens=1_234_567, queued_prefill_tokens=98_765, kv_blocks_used=123_456, kv_blocks_cached=98_765,
    kv_blocks_total=234_567, kv_block_size=16, kv_eviction_horizon=1790000000.123456,
    busy_seconds_total=123456.789012345, prefill_seconds_total=12345.6789012345,
    computed_prompt_tokens_total=12_345_678_901, prompt_tokens_total=23_456_789_012,
    cached_prompt_tokens_total=11_111_110_111, prefill_tokens_per_second=45678.901234567,
    decode_step_seconds=0.0234567890123, vram_used_bytes=137_438_953_472, vram_total_bytes=150_323_855_360,
    nvlink_tx_bytes_per_second=123456789012.345, nvlink_rx_bytes_per_second=123456789012.345,
    kv_transfer_bytes_per_second=12345678901.234, kv_transfer_bytes_total=1_234_567_890_123_456,
    kv_transfer_seconds_total=12345.6789012345,
)  # fmt: skip
"""With every figure, in many digits."""


def serve(started: Connection) -> None:
    body = SAMPLE.to_json().encode()
    answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def run() -> None:
        server = await asyncio.start_server(carry, "127.0.0.1", 0, backlog=1024)
        started.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(run())


async def measure(workers: int, port: int, seconds: float) -> str:
    told = ["--served-name", "m", "--no-access-log", "--host", "127.0.0.1", "--port", "0", "--metrics-port", "0"]
    server = Server(parse_settings([*told, "--worker=url=127.0.0.1:1"]))
    known = [
        Worker(
            name=f"llama-70b-production-decode-{index}", address=f"10.123.{index // 250}.{index % 250}:8000",
            role=Role.DECODE, revision="5f2c9d7e81", status_address=f"127.0.0.1:{port}",
        )
        for index in range(workers)
    ]  # fmt: skip
    period = max(1.0, workers / 100)
    server.apply_workers(known)
    task = asyncio.create_task(server.telemetry.run())
    await asyncio.sleep(2 * period)
    reads, began = server.telemetry.reads["ok"], time.process_time()
    await asyncio.sleep(seconds)
    used, reads = time.process_time() - began, server.telemetry.reads["ok"] - reads
    assert all(server.telemetry.sample(worker) is not None for worker in known)
    for endpoint in server.gateway.scheduler.endpoints.values():
        endpoint.ttft_counts = [12_345] * len(endpoint.ttft_counts)
    took: list[float] = []
    size = 0
    for _ in range(REPORTS):
        began = time.process_time()
        size = len(server.reports.describe_fleet().to_json())
        took.append(time.process_time() - began)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return (
        f"{workers:5d} workers: {reads / seconds:.1f} reads/s take {used / seconds:.2%} of a core; "
        f"the report has {size / 1024:.0f} KiB and takes {1000 * min(took):.1f} ms of CPU"
    )


async def main(port: int, seconds: float) -> None:
    for workers in FLEETS:
        print(await measure(workers, port, seconds), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    mine, theirs = multiprocessing.Pipe()
    stub = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    stub.start()
    try:
        uvloop.run(main(mine.recv(), options.seconds))
    finally:
        stub.kill()
