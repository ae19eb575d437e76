"""What the doubles of other engines have in common: a small HTTP server on loopback that speaks the OpenAI API.

A double is no engine: its text is made from the prompt, so that an answer made from another request's blocks, or from
none, is a different one. It is strict where the real one would be wrong or slow: a request that breaks the protocol is
answered 400, never guessed at.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tandem_api.engines import EngineKind, needs_prefill
from tandem_api.names import Role
from tandem_gateway.scheduling import Worker

from tests.ports import free_port

PAIRED = ("/v1/chat/completions", "/v1/completions")
DEFAULT_TOKENS = 5


class Refused(Exception):
    """The request breaks the protocol."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class Asked:
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


def read_prompt(path: str, body: dict[str, Any]) -> str:
    if path == "/v1/completions":
        return json.dumps(body["prompt"])
    return json.dumps([body["messages"], body.get("tools")])


def count_tokens(prompt: str) -> int:
    return max(1, len(prompt) // 4)


def write_text(prompt: str, tokens: int) -> list[str]:
    """What the model says to a prompt."""
    seed = zlib.crc32(prompt.encode())
    return [f"w{(seed >> index) % 1000} " for index in range(tokens)]


@dataclass
class EngineDouble:
    """One worker. `faults` are used up one by a request: `die` closes the connection, `busy` answers 503, `error` 500,
    `hang` says nothing, `late-die` closes it after some tokens, `late-error` ends the stream with an error event."""

    kind: ClassVar[EngineKind]
    name: str
    role: Role = Role.UNIFIED
    revision: str = "r1"
    model: str = "toy"
    faults: list[str] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    cut: Callable[[bytes], list[bytes]] = lambda data: [data]
    """In which pieces a stream is written."""
    keep_alive: float = 5.0
    answering: int = 0
    port: int = 0
    connections: int = 0
    cancelled: int = 0
    """Requests that the gateway gave up."""
    cached_prompts: set[str] = field(default_factory=set)
    computed: int = 0
    """Prompts computed here."""
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port or free_port())
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Also: it dies. Its port refuses connections from now on."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def worker(self) -> Worker:
        return Worker(
            name=self.name, address=f"127.0.0.1:{self.port}", role=self.role, revision=self.revision,
            kv_address=self.kv_address, engine=self.kind, needs_prefill=needs_prefill(self.kind, self.role),
        )  # fmt: skip

    @property
    def kv_address(self) -> str:
        return ""

    async def respond(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        """Answer an inference request.

        Raises:
            Refused: it breaks the protocol.
        """
        raise NotImplementedError

    # HTTP

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            while not writer.is_closing():
                async with asyncio.timeout(self.keep_alive):
                    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                await self._serve(head, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, TimeoutError):
            pass
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _serve(self, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line, *fields = head.split("\r\n")
        headers = {key.lower(): value.strip() for key, _, value in (item.partition(":") for item in fields if item)}
        method, path, _ = line.split(" ")
        text = await reader.readexactly(int(headers.get("content-length", "0")))
        if method == "GET":
            await self._get(path, writer)
            return
        asked = Asked(path, headers, json.loads(text))
        self.asked.append(asked)
        self.answering += 1
        work = asyncio.create_task(self._answer(asked, writer))
        watch = asyncio.create_task(reader.read(1))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self.cancelled += 1
                writer.transport.abort()
        finally:
            self.answering -= 1
            for task in (work, watch):
                task.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)
        if not work.cancelled() and (error := work.exception()) is not None:
            raise error

    async def _get(self, path: str, writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            card = {"id": self.model, "object": "model", "root": "org/toy", "max_model_len": 4096}
            await send_json(writer, 200, {"object": "list", "data": [card]})
        else:
            await send_json(writer, 200 if path == "/health" else 404, {})

    async def _answer(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        fault = self.faults[0] if self.faults else ""
        if fault in ("die", "busy", "error", "hang"):
            self.faults.pop(0)
        if fault == "die":
            writer.transport.abort()
        elif fault == "hang":
            await asyncio.Event().wait()
        elif fault in ("busy", "error"):
            await send_error(writer, 503 if fault == "busy" else 500, f"the double is told to be {fault}")
        else:
            try:
                self._check(asked.body)
                await self.respond(asked, writer)
            except Refused as refusal:
                await send_error(writer, refusal.status, str(refusal))

    def _check(self, body: dict[str, Any]) -> None:
        if body.get("model") != self.model:
            raise Refused(f"The model `{body.get('model')}` does not exist.", 404)
        if body.get("stream_options") is not None and not body.get("stream"):
            raise Refused("stream_options needs stream")

    # answers

    async def say(
        self, asked: Asked, writer: asyncio.StreamWriter, words: list[str], usage: dict[str, Any], **more: Any
    ) -> None:
        """Words as an answer of the API that was asked, in one piece or as a stream."""
        chat, stream = asked.path == PAIRED[0], bool(asked.body.get("stream"))
        tools = chat and asked.body.get("tools") and asked.body.get("tool_choice") != "none"
        reason = "length" if len(words) == 1 else "tool_calls" if tools else "stop"
        kind = ("chat.completion.chunk" if stream else "chat.completion") if chat else "text_completion"
        frame: dict[str, Any] = {"id": f"x-{asked.headers['x-request-id']}", "object": kind, "created": 1,
                                 "model": self.model}  # fmt: skip
        if not stream:
            choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": reason}
            if not chat:
                choice["text"] = "".join(words)
            elif tools:
                choice["message"] = {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [build_tool_call(asked, words)],
                }
            else:
                choice["message"] = {"role": "assistant", "content": "".join(words)}
            await send_json(writer, 200, frame | {"choices": [choice], "usage": usage} | more)
            return
        events = [frame | {"choices": [item]} | self.blank_usage() for item in build_deltas(asked, words, reason)]
        if (asked.body.get("stream_options") or {}).get("include_usage"):
            events.append(frame | {"choices": [], "usage": usage})
        await self._stream(writer, [b"data: " + dump(item) + b"\n\n" for item in events] + [b"data: [DONE]\n\n"])

    def blank_usage(self) -> dict[str, Any]:
        """What chunks before the last say of the usage."""
        return {}

    async def _stream(self, writer: asyncio.StreamWriter, events: list[bytes]) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                     b"transfer-encoding: chunked\r\n\r\n")  # fmt: skip
        fault = self.faults.pop(0) if self.faults else ""
        if fault:
            events = events[:3] + ([b'data: {"error":{"message":"out of blocks","code":500}}\n\ndata: [DONE]\n\n']
                                   if fault == "late-error" else [])  # fmt: skip
        for piece in self.cut(b"".join(events)):
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
            await asyncio.sleep(0)
        if fault == "late-die":
            await writer.drain()
            await asyncio.sleep(0.02)
            writer.transport.abort()
        else:
            writer.write(b"0\r\n\r\n")
            await writer.drain()


def build_tool_call(asked: Asked, words: list[str]) -> dict[str, Any]:
    function = {
        "name": asked.body["tools"][0]["function"]["name"],
        "arguments": dump({"said": "".join(words)}).decode(),
    }
    return {"id": "call-1", "type": "function", "function": function}


def build_deltas(asked: Asked, words: list[str], reason: str) -> list[dict[str, Any]]:
    if asked.path != PAIRED[0]:
        ends = [None] * (len(words) - 1) + [reason]
        return [{"index": 0, "text": word, "finish_reason": end} for word, end in zip(words, ends, strict=True)]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if reason == "tool_calls":
        call = build_tool_call(asked, words)
        text = call["function"]["arguments"]
        named = call | {"index": 0, "function": call["function"] | {"arguments": ""}}
        deltas.append({"tool_calls": [named]})
        deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": part}}]} for part in (text[:4], text[4:])]
    else:
        deltas += [{"content": word} for word in words]
    found = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    return [*found, {"index": 0, "delta": {}, "finish_reason": reason}]


def dump(value: object) -> bytes:
    """As both engines write JSON: without spaces."""
    return json.dumps(value, separators=(",", ":")).encode()


async def send_json(writer: asyncio.StreamWriter, status: int, payload: object) -> None:
    body = dump(payload)
    writer.write(b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                 % (status, len(body), body))  # fmt: skip
    await writer.drain()


async def send_error(writer: asyncio.StreamWriter, status: int, message: str) -> None:
    kind = "BadRequestError" if status < 500 else "InternalServerError"
    await send_json(writer, status, {"error": {"message": message, "type": kind, "param": None, "code": status}})
