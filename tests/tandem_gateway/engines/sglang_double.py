"""A double of an SGLang worker, by itself or as one of a pair, written from what SGLang documents and from its load
balancers: https://docs.sglang.io/docs/advanced_features/pd_disaggregation.md and `sglang.srt.disaggregation` there.

A prefill worker opens a room and waits in it; a decode worker finds it by the bootstrap address. Whoever comes alone
waits for `room_seconds`, then fails. Nobody computes a prompt in decode mode.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from engine_double import DEFAULT_TOKENS, Asked, EngineDouble, Refused, count_tokens, read_prompt, write_text
from tandem_api.names import Role

_MEETING = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
bootstraps: dict[tuple[str, int], SGLangDouble] = {}
"""Prefill workers, by where their bootstrap servers listen."""


@dataclass
class Room:
    prompt: str = ""
    filled: asyncio.Event = field(default_factory=asyncio.Event)
    """The prefill worker is there, with the prompt's blocks."""
    joined: asyncio.Event = field(default_factory=asyncio.Event)
    """The decode worker is there."""
    lost: bool = False
    """The prefill worker has died."""


@dataclass
class SGLangDouble(EngineDouble):
    kind = "SGLang"
    room_seconds: float = 2.0
    slow_prefill: float = 0.0
    """Seconds between the transfer and the prefill worker's answer."""
    rooms: dict[int, Room] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)
    bootstrap_port: int = 0

    async def start(self) -> None:
        await super().start()
        self.bootstrap_port = self.port + 20000  # nobody listens there: the double's transport is a dictionary
        if self.role is Role.PREFILL:
            bootstraps["127.0.0.1", self.bootstrap_port] = self

    async def stop(self) -> None:
        bootstraps.pop(("127.0.0.1", self.bootstrap_port), None)
        for room in self.rooms.values():
            room.lost = True
            room.filled.set()
        await super().stop()

    @property
    def kv_address(self) -> str:
        return f"127.0.0.1:{self.bootstrap_port}" if self.role is Role.PREFILL else ""

    def blank_usage(self) -> dict[str, Any]:
        return {"usage": None}

    async def respond(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        body = asked.body
        if body.get("kv_transfer_params") is not None:
            raise Refused("kv_transfer_params is vLLM's")
        prompt = read_prompt(asked.path, body)
        tokens = body.get("max_completion_tokens") or body.get("max_tokens") or DEFAULT_TOKENS
        if tokens < 0:
            raise Refused("max_tokens must be positive")
        given = [body.get(name) for name in _MEETING]
        cached = 0
        if self.role is Role.UNIFIED:
            if any(value is not None for value in given):
                raise Refused("not started with --disaggregation-mode")
            cached = self._compute(prompt)
        elif any(value is None for value in given):
            raise Refused("a worker in prefill or decode mode needs a bootstrap host, port and room")
        elif self.role is Role.PREFILL:
            tokens, cached = 1, await self._prefill(prompt, *given)
        else:
            prompt = await self._join(prompt, *given)
        await self.say(asked, writer, write_text(prompt, tokens), self._usage(prompt, tokens, cached))

    def _compute(self, prompt: str) -> int:
        self.computed += 1
        known = prompt in self.cached_prompts
        self.cached_prompts.add(prompt)
        return count_tokens(prompt) - 1 if known else 0

    async def _prefill(self, prompt: str, host: str, port: int, number: int) -> int:
        if (host, port) != ("127.0.0.1", self.bootstrap_port):
            raise Refused("this is not the bootstrap server of this worker")
        if type(number) is not int or not 0 <= number < 1 << 63 or number in self.used:
            raise Refused("a room is a number of 63 bits that no request had before")
        self.used.add(number)
        room = self.rooms.setdefault(number, Room())
        cached = self._compute(prompt)
        room.prompt = prompt
        room.filled.set()
        try:
            async with asyncio.timeout(self.room_seconds):
                await room.joined.wait()
        except TimeoutError:
            raise Refused("KVTransferError: nobody came for the blocks", 500) from None
        finally:
            self.rooms.pop(number, None)
        await asyncio.sleep(self.slow_prefill)
        return cached

    async def _join(self, prompt: str, host: str, port: int, number: int) -> str:
        holder = bootstraps.get((host, port))
        if holder is None:
            raise Refused("KVTransferError: the bootstrap server does not answer", 500)
        room = holder.rooms.setdefault(number, Room())
        room.joined.set()
        try:
            async with asyncio.timeout(self.room_seconds):
                await room.filled.wait()
        except TimeoutError:
            raise Refused("KVTransferError: nobody is in this room", 500) from None
        if room.lost:
            await asyncio.sleep(0.05)  # heartbeats take longer than a broken connection
            raise Refused("KVTransferError: the prefill worker is lost", 500)
        if room.prompt != prompt:
            raise Refused("the prefill worker was asked something else")
        return room.prompt

    def _usage(self, prompt: str, tokens: int, cached: int) -> dict[str, Any]:
        total = count_tokens(prompt)
        return {"prompt_tokens": total, "total_tokens": total + tokens, "completion_tokens": tokens,
                "prompt_tokens_details": {"cached_tokens": cached}, "reasoning_tokens": 0}  # fmt: skip
