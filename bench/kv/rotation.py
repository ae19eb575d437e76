"""Conversations over two prefill and two decode workers, whose turns go round: what of them is cached, and whether the
answers are those that a worker without any cache gives."""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.engine.server import Worker, worker
from bench.kv.__main__ import VOCABULARY, read_metric

MEMORY_BYTES = 48 << 20
"""Of each worker that has a share in the store besides: about two thousand tokens of SmolLM2."""
FIRST_TOKENS, MORE_TOKENS, ANSWER_TOKENS = 400, 100, 16
"""A conversation's first prompt, what a turn adds to it, and an answer."""
_READY_SECONDS = 30.0


@dataclass(slots=True)
class Seen:
    """What a fleet answered."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    answers: list[list[int]] = field(default_factory=list)
    loaded_tokens: float = 0.0
    """From the store, or from disks and other workers."""
    loads_cut: float = 0.0
    """Loads and look-ups that were late."""

    @property
    def cached_share(self) -> float:
        return self.cached_tokens / self.prompt_tokens


Ask = Callable[[int, int, list[int]], dict[str, Any]]
"""The answer to a prompt: number of the request, of its conversation, and the tokens."""


def converse(ask: Ask, sessions: int, turns: int) -> Seen:
    """Conversations take turns; each prompt is the one before, its answer, and more."""
    rng, seen = random.Random(5), Seen()
    prompts = [[rng.randrange(1000, VOCABULARY) for _ in range(FIRST_TOKENS)] for _ in range(sessions)]
    for turn in range(turns):
        for session, prompt in enumerate(prompts):
            told = ask(turn * sessions + session, session, prompt)
            answer = told["choices"][0]["token_ids"]
            seen.answers.append(answer)
            seen.prompt_tokens += told["usage"]["prompt_tokens"]
            details = told["usage"].get("prompt_tokens_details") or {}
            seen.cached_tokens += details.get("cached_tokens", 0)
            prompt += [*answer, *(rng.randrange(1000, VOCABULARY) for _ in range(MORE_TOKENS))]
    return seen


def complete(
    port: int, prompt: list[int], prefill: str | None = None, salt: str | None = None, source: str | None = None
) -> dict[str, Any]:
    """One answer in one piece. `source`: who has a part of the prompt, as a gateway would say it."""
    body: dict[str, Any] = {
        "model": "bench", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    if salt is not None:
        body["cache_salt"] = salt
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"}
        | ({} if prefill is None else {"x-tandem-prefill": prefill})
        | ({} if source is None else {"x-tandem-kv-source": source}),
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())


def converse_without_cache(model: Path, sessions: int, turns: int) -> Seen:
    """One worker, and a salt of its own for every request."""
    with worker("unified", model, "BFloat16", len(os.sched_getaffinity(0))) as alone:
        return converse(lambda number, _, prompt: complete(alone.port, prompt, salt=f"salt {number}"), sessions, turns)


@contextlib.contextmanager
def run_fleet(
    model: Path, kv: Mapping[str, Any], disks: Path | None = None
) -> Iterator[tuple[list[Worker], list[Worker]]]:
    """Two prefill and two decode workers, each with `kv`, and a disk of its own in `disks`, where that is given."""
    threads = len(os.sched_getaffinity(0))

    def plan(role: str, number: int) -> dict[str, Any]:
        if disks is None:
            return dict(kv)
        own = disks / f"{role}-{number}"
        own.mkdir(parents=True)
        return dict(kv) | {"disk": {"path": str(own), "sizeBytes": 1 << 30}}

    with contextlib.ExitStack() as stack:
        prefills, decodes = (
            [stack.enter_context(worker(role, model, "BFloat16", threads, kv=plan(role, each))) for each in range(2)]
            for role in ("prefill", "decode")
        )
        yield prefills, decodes


def converse_by_affinity(
    model: Path, memory_bytes: int, sessions: int, turns: int, disks: Path | None = None, *, peers: bool = False
) -> Seen:
    """A conversation stays with its pair. `disks` and `peers`: as in `converse_with_peers`."""
    kv = {"memoryBytes": memory_bytes} | ({"peers": True} if peers else {})
    with run_fleet(model, kv, disks) as (prefills, decodes):

        def ask(_: int, session: int, prompt: list[int]) -> dict[str, Any]:
            prefill = prefills[session % len(prefills)]
            return complete(decodes[session % len(decodes)].port, prompt, f"127.0.0.1:{prefill.kv_port}")

        return converse(ask, sessions, turns)


def converse_in_rotation(model: Path, store: Mapping[str, Any], sessions: int, turns: int) -> Seen:
    """Every request goes to the next pair, and prefill workers turn half as fast, so that all pairs meet. An odd number
    of conversations does not stay where it was."""
    with run_fleet(model, {"memoryBytes": MEMORY_BYTES} | dict(store)) as (prefills, decodes):
        for each in (*prefills, *decodes):
            await_store(each)

        def ask(number: int, _: int, prompt: list[int]) -> dict[str, Any]:
            prefill = prefills[number // 2 % len(prefills)]
            return complete(decodes[number % len(decodes)].port, prompt, f"127.0.0.1:{prefill.kv_port}")

        seen = converse(ask, sessions, turns)
        for each in (*prefills, *decodes):
            seen.loaded_tokens += read_metric(
                each, "tandem_worker_kv_tier_tokens_total", direction="read", tier="store"
            )
            seen.loads_cut += read_metric(each, "tandem_worker_kv_loads_cut_total", tier="store")
        return seen


def converse_with_peers(
    model: Path, memory_bytes: int, sessions: int, turns: int, disks: Path | None, *, peers: bool
) -> Seen:
    """As `converse_in_rotation`, without a store, over workers that have disks in `disks` and give each other blocks:
    whoever answered a conversation last has all of it, and is named as a gateway would name it."""
    last: dict[int, tuple[Worker, int]] = {}
    kv = {"memoryBytes": memory_bytes} | ({"peers": True} if peers else {})
    with run_fleet(model, kv, disks) as (prefills, decodes):

        def ask(number: int, session: int, prompt: list[int]) -> dict[str, Any]:
            prefill, decode = prefills[number // 2 % len(prefills)], decodes[number % len(decodes)]
            source = None
            if peers and session in last:
                holder, tokens = last[session]
                source = f"127.0.0.1:{holder.kv_port};tokens={tokens}"
            last[session] = decode, len(prompt) + ANSWER_TOKENS
            return complete(decode.port, prompt, f"127.0.0.1:{prefill.kv_port}", source=source)

        seen = converse(ask, sessions, turns)
        for each in (*prefills, *decodes):
            for tier in (["disk"] if disks is not None else []) + (["peer"] if peers else []):
                seen.loaded_tokens += read_metric(
                    each, "tandem_worker_kv_tier_tokens_total", direction="read", tier=tier
                )
                seen.loads_cut += read_metric(each, "tandem_worker_kv_loads_cut_total", tier=tier)
        return seen


def await_store(source: Worker) -> None:
    """Until the worker uses its store. Raises TimeoutError."""
    deadline = time.monotonic() + _READY_SECONDS
    while not read_metric(source, "tandem_worker_kv_tier_ready", tier="store"):
        if time.monotonic() > deadline:
            raise TimeoutError("the worker does not use its store")
        time.sleep(0.1)
