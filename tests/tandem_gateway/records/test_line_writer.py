"""Logs whose reader has stopped: lines are lost and counted, and nobody waits."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading

import pytest
from tandem_gateway.records.line_writer import LineWriter


async def test_a_blocked_standard_output_stops_nothing(launch, start_worker, chat, connect) -> None:
    worker = await start_worker()
    process = await launch("--worker", f"url=127.0.0.1:{worker.port}", "--lame-duck", "0")
    reader, writer = await connect(process.http_port)
    async with asyncio.timeout(30):
        for _ in range(2000):
            writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n" + chat())
            for _ in range(2):
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200")
                await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
    process.process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(60):
        stdout, _ = await process.process.communicate()
    assert process.process.returncode == 0
    assert sum(json.loads(line)["message"] == "request" for line in stdout.splitlines()) == 4000


def test_what_does_not_fit_is_counted_and_told() -> None:
    reader, descriptor = os.pipe()
    writer = LineWriter(descriptor, "test", max_queued_bytes=200_000)
    line = b"%099d\n"
    for index in range(5_000):
        writer.write(line % index)
    assert writer.dropped >= 5_000 - (200_000 + (1 << 16)) // 100 - 1
    read: list[bytes] = []

    def follow() -> None:
        while data := os.read(reader, 1 << 16):
            read.append(data)

    thread = threading.Thread(target=follow)
    thread.start()
    while writer.backlog:
        pass
    writer.write(line % 7)
    writer.close()
    os.close(descriptor)
    thread.join()
    os.close(reader)
    lines = b"".join(read).splitlines()
    told = [json.loads(item)["count"] for item in lines if item.startswith(b"{")]
    numbers = [int(item) for item in lines[:-1] if not item.startswith(b"{")]
    assert sum(told) == writer.dropped
    assert len(numbers) + 1 + writer.dropped == 5_001
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("blocking", [True, False])
def test_lines_stay_whole_whatever_the_descriptor_is_like(blocking: bool) -> None:
    reader, descriptor = os.pipe()
    os.set_blocking(descriptor, blocking)
    writer = LineWriter(descriptor, "test")
    for index in range(3_000):
        writer.write(b"%0199d\n" % index)
    read = b""
    while len(read) < 600_000:
        read += os.read(reader, 1 << 16)
    writer.close()
    os.close(reader)
    os.close(descriptor)
    assert [int(line) for line in read.splitlines()] == list(range(3_000))


def test_a_reader_that_has_gone_is_no_error() -> None:
    reader, descriptor = os.pipe()
    os.close(reader)
    writer = LineWriter(descriptor, "test")
    writer.write(b"x\n")
    writer.close()
    os.close(descriptor)
    assert writer.backlog == 0
