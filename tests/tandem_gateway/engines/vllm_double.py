"""A double of a vLLM worker, with or without its NixlConnector, written from what vLLM documents and its example proxy:
https://docs.vllm.ai/en/stable/features/nixl_connector_usage.html and `tests/v1/kv_connector/nixl_integration` there.

Blocks are prompts kept under numbers by the worker that computed them, and found by engine id, host and port, as the
side channel does. They are fetched once.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field
from typing import Any

from engine_double import DEFAULT_TOKENS, Asked, EngineDouble, Refused, count_tokens, read_prompt, write_text

_KNOWN = {"do_remote_decode", "do_remote_prefill", "remote_engine_id", "remote_block_ids", "remote_host", "remote_port",
          "tp_size", "remote_request_id"}  # fmt: skip
_PLACE = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
side_channels: dict[tuple[str, int], VLLMDouble] = {}
"""Who is reached where."""


@dataclass
class VLLMDouble(EngineDouble):
    kind = "VLLM"
    has_connector: bool = True
    """Started with `--kv-transfer-config`."""
    tells_cached: bool = True
    """Started with `--enable-prompt-tokens-details`."""
    engine_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    kept: dict[tuple[int, ...], str] = field(default_factory=dict)
    """Blocks that wait to be fetched, by their numbers."""
    fetched: int = 0
    side_port: int = 0
    _next_block: int = 1

    async def start(self) -> None:
        await super().start()
        self.side_port = self.port + 20000  # nobody listens there: the double's transport is a dictionary
        side_channels["127.0.0.1", self.side_port] = self

    async def stop(self) -> None:
        side_channels.pop(("127.0.0.1", self.side_port), None)
        await super().stop()

    async def respond(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        body = asked.body
        if steering := [name for name in body if name.startswith("bootstrap_")]:
            raise Refused(f"{steering[0]} is SGLang's")
        prompt = read_prompt(asked.path, body)
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or DEFAULT_TOKENS
        if (body.get("min_tokens") or 0) > limit:
            raise Refused(f"min_tokens must be less than or equal to max_tokens={limit}")
        params: dict[str, Any] = body.get("kv_transfer_params") or {}
        if unknown := set(params) - _KNOWN:
            raise Refused(f"kv_transfer_params: unknown {sorted(unknown)}")
        more: dict[str, Any] = {"kv_transfer_params": None}
        if params.get("do_remote_prefill"):
            source, cached = self._fetch(params), count_tokens(prompt) - 1  # what was fetched counts as cached
        else:
            source, cached = prompt, self._compute(prompt)
            if params.get("do_remote_decode"):
                self._check_prefill(body, limit)
                more = {"kv_transfer_params": self._keep(prompt)} if self.has_connector else more
        await self.say(asked, writer, write_text(source, limit), self._usage(prompt, limit, cached), **more)

    def _compute(self, prompt: str) -> int:
        """Tokens of it that were cached."""
        self.computed += 1
        known = prompt in self.cached_prompts
        self.cached_prompts.add(prompt)
        return count_tokens(prompt) - 1 if known else 0

    def _check_prefill(self, body: dict[str, Any], limit: int) -> None:
        if body.get("stream") or limit != 1 or body["kv_transfer_params"].get("do_remote_prefill"):
            raise Refused("a prefill is one token, in one piece")
        if any(body["kv_transfer_params"].get(name) is not None for name in _PLACE):
            raise Refused("a prefill has no blocks yet")

    def _keep(self, prompt: str) -> dict[str, Any]:
        numbers = tuple(range(self._next_block, self._next_block + 1 + count_tokens(prompt) // 16))
        self._next_block = numbers[-1] + 1
        self.kept[numbers] = prompt
        return {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": list(numbers),
            "remote_engine_id": self.engine_id, "remote_host": "127.0.0.1", "remote_port": self.side_port, "tp_size": 1,
        }  # fmt: skip

    def _fetch(self, params: dict[str, Any]) -> str:
        if not self.has_connector:
            raise Refused("started without a connector")
        if any(params.get(name) is None for name in _PLACE) or params.get("do_remote_decode"):
            raise Refused(f"a remote prefill needs {', '.join(_PLACE)}")
        holder = side_channels.get((params["remote_host"], params["remote_port"]))
        if holder is None or holder.engine_id != params["remote_engine_id"]:
            raise Refused("the side channel does not answer", 500)
        prompt = holder.kept.pop(tuple(params["remote_block_ids"]), None)
        if prompt is None:
            raise Refused("no such blocks", 500)
        self.fetched += 1
        return prompt

    def _usage(self, prompt: str, tokens: int, cached: int) -> dict[str, Any]:
        total = count_tokens(prompt)
        details = {"cached_tokens": cached} if cached and self.tells_cached else None
        return {"prompt_tokens": total, "total_tokens": total + tokens, "completion_tokens": tokens,
                "prompt_tokens_details": details}  # fmt: skip
