"""A streamed completion, over a real socket."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from bench.completions import MODEL, ask
from bench.pd.load import ask_for

HEAD = b"HTTP/1.1 200 OK\r\nx-tandem-prefill-worker: p0\r\nconnection: close\r\n\r\n"
EVENT = b'data: {"choices": [{"text": "ab"}]}\n\n'


@asynccontextmanager
async def serve(*pieces: bytes, asked: list[object]) -> AsyncIterator[str]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        asked.append(json.loads(await reader.readexactly(length)))
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_every_text_has_its_time() -> None:
    asked: list[object] = []
    async with serve(HEAD, EVENT, EVENT + b"data: [DONE]\n\n", asked=asked) as url:
        received = await ask(url, [1, 2], 7)
        answer = await ask_for(url, [3], "salty", output=9)
    assert len(received.times) == 2
    assert received.sent <= received.times[0] <= received.times[1]
    assert (answer.text, answer.computed_by, len(answer.gaps)) == ("abab", "p0", 1)
    fixed = {"model": MODEL, "temperature": 0, "stream": True, "ignore_eos": True}
    assert asked == [
        fixed | {"prompt": [1, 2], "max_tokens": 7},
        fixed | {"prompt": [3], "max_tokens": 9, "cache_salt": "salty"},
    ]


@pytest.mark.parametrize("pieces", [(HEAD, EVENT), (HEAD, b"data: [DONE]\n\n"), ()])
async def test_an_answer_that_breaks_off_is_an_error(pieces: tuple[bytes, ...]) -> None:
    async with serve(*pieces, asked=[]) as url:
        with pytest.raises(RuntimeError, match="incomplete"):
            await ask(url, [1], 1)
