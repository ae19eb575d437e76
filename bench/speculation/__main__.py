"""`make bench-speculation`: workers that guess against one that does not, over HTTP, in turns in one run.

Workers differ in nothing but `spec.engine.speculative`. What counts is the CPU time of a worker for each token that it
answers with, the prompt being in its cache: other load on the machine disturbs that less than it does the clock. A
ratio is that of the worker without guesses over another's in the same round, above 1 where guesses are cheaper. Every
answer must be the same. Medians and quartiles of the rounds; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tandem_worker.model.backends import native

from bench.engine import server
from bench.engine.__main__ import describe_machine
from bench.speculation.texts import KINDS, Ask
from e2e.model import find_model

SETTINGS: dict[str, dict[str, object]] = {
    "none": {"method": "Off"},
    "adaptive": {"method": "Auto"},
    "fixed": {"method": "Lookup", "adaptive": False, "maxTokens": 5},
}
GOALS = {
    ("edits", 1): 3.0, ("loops", 1): 2.5, ("chat", 1): 1.3, ("edits", 8): 1.8, ("loops", 8): 1.4, ("chat", 8): 1.15,
}  # fmt: skip
"""Of `adaptive`, by what is asked and how many at once."""
LEAST = 0.99
"""Its goal elsewhere: nobody is slower."""


async def answer(port: int, ask: Ask, new_tokens: int) -> tuple[str, int]:
    """The text of an answer of exactly `new_tokens`, and how many tokens it has."""
    body = {"model": "bench", "max_tokens": new_tokens, "temperature": 0, **ask.body}
    if "response_format" not in body and "tools" not in body:
        body["ignore_eos"] = True
    payload = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    received = await server.exchange(port, ask.path, payload)
    text, tokens = "", 0
    for line in received.splitlines():
        if not line.startswith(b"data: {"):
            continue
        event: dict[str, Any] = json.loads(line[len(b"data: ") :])
        for choice in event["choices"]:
            delta = choice.get("delta") or {}
            text += choice.get("text") or delta.get("content") or ""
            text += "".join(call["function"].get("arguments") or "" for call in delta.get("tool_calls") or ())
        tokens = event["usage"]["completion_tokens"] if event.get("usage") else tokens
    if tokens != new_tokens:
        raise RuntimeError(f"asked for {new_tokens} tokens, got {tokens}")
    return text, tokens


async def answers(port: int, asks: list[Ask], new_tokens: int) -> list[str]:
    return [text for text, _ in await asyncio.gather(*(answer(port, ask, new_tokens) for ask in asks))]


class Round:
    """Asks every worker the same, one worker after the other."""

    def __init__(self, workers: Mapping[str, server.Worker], new_tokens: int) -> None:
        self._workers = workers
        self._new_tokens = new_tokens
        self.differing = 0
        self._turns = 0

    def once(self, kind: Callable[[int], Ask], concurrency: int, number: int) -> dict[str, float]:
        """CPU seconds of each worker. Salts are fresh: no earlier answer is known. Each round begins with another
        worker, for whoever is asked first finds another machine than the rest."""
        asks = [kind(number + place) for place in range(concurrency)]
        salted = [Ask(ask.path, {**ask.body, "cache_salt": os.urandom(8).hex()}) for ask in asks]
        costs: dict[str, float] = {}
        told: list[list[str]] = []
        order = list(self._workers.items())
        first = self._turns % len(order)
        self._turns += 1
        for name, worker in [*order[first:], *order[:first]]:
            asyncio.run(answers(worker.port, salted, 1))
            before = worker.cpu_seconds()
            told.append(asyncio.run(answers(worker.port, salted, self._new_tokens)))
            costs[name] = max(0.01, worker.cpu_seconds() - before)
        self.differing += sum(each != told[0] for each in told)
        return costs


def measure(rounds: list[dict[str, float]], setting: str, goal: float | None) -> dict[str, object]:
    ratios = sorted(each["none"] / each[setting] for each in rounds)
    value = statistics.median(ratios)
    return {
        "value": round(value, 3),
        "quartiles": [round(ratios[len(ratios) // 4], 3), round(ratios[-1 - len(ratios) // 4], 3)],
        "goal": goal,
        "met": None if goal is None else value >= goal,
    }


def bench(options: argparse.Namespace) -> tuple[dict[str, object], int]:
    settings = dict(SETTINGS)
    if options.head is not None:
        settings["head"] = {"method": "Auto", "draft": {"uri": f"file://{options.head.resolve()}"}}
    names = ["none", *options.settings.split(","), *(["head"] if options.head is not None else [])]
    rows: dict[str, object] = {}
    with ExitStack() as stack:
        workers = {
            name: stack.enter_context(
                server.worker("unified", find_model(), "BFloat16", options.threads, speculative=settings[name])
            )
            for name in names
        }
        turn = Round(workers, options.tokens)
        turn.once(KINDS["chat"], 1, 0)  # warm all
        for concurrency in map(int, options.streams.split(",")):
            for kind in options.kinds.split(","):
                found = [turn.once(KINDS[kind], concurrency, concurrency * number) for number in range(options.rounds)]
                for name in names[1:]:
                    goal = GOALS.get((kind, concurrency), LEAST) if name == "adaptive" else None
                    row = rows[f"{kind}, {concurrency} at once, {name}"] = measure(found, name, goal)
                    print(f"  {kind:<10} {concurrency:>3} at once  {name:<9} {row}", flush=True)
    return rows, turn.differing


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.speculation", description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--streams", default="1,8")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--settings", default="adaptive,fixed")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--head", type=Path, metavar="FOLDER", help="a draft head for SmolLM2: adaptive with it besides"
    )
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="write the last line there")
    options = parser.parse_args()
    if (obstacle := native.find_obstacle()) is not None:
        print(f"nothing to measure: {obstacle}")
        return 1
    machine = describe_machine(options.threads, "BFloat16")
    print(", ".join(str(value) for value in machine.values()))
    rows, differing = bench(options)
    found = {"machine": machine, "rows": rows, "differing_answers": differing}
    if options.record:
        options.record.mkdir(parents=True, exist_ok=True)
        file = options.record / f"speculation-{options.threads}threads-{machine['date']}.json"
        file.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(found, ensure_ascii=False))
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
