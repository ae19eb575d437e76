"""Starters that give each other a model: what a slow hub is asked for, when each is ready, and what kills do to them.

    python -m bench.start.swarm [--starters 8] [--rounds 3] [--kills 20] [--megabytes 100] [--rate 20] [--seed 1]

Starters are processes that do what a worker does until its model is there (`bench.start.starter`), each with an empty
cache folder, on loopback; the hub sends `--rate` megabytes per second to all of them together. One start alone and
all at once take turns; they are timed from the question for the commit to the verified model, for on nodes of their
own starters would not wait for each other's imports. Then processes are killed (SIGKILL), by turns one that still gets
the model and one that has it and serves others, and come up again, by turns over what they left and with nothing. Every
start that is not killed must have the hub's bytes. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bench.start.starters import LIMIT_SECONDS, MB, Ready, Starters

HUB_GOAL = 1.2
"""Times the model that the hub sends to all who start at once."""
READY_GOAL = 1.5
"""Times one start alone, after each one's share of the link."""


class _Round:
    """Starts at once, cold."""

    def __init__(self, starters: Starters, count: int) -> None:
        before = starters.hub.sent
        numbers = list(range(count))
        for number in numbers:
            starters.start(number, held=True)
        starters.release(numbers)
        self.ready = starters.finish_all(numbers)
        self.of_hub = (starters.hub.sent - before) / starters.model_bytes
        self.slowest = max(start.seconds for start in self.ready)
        for number in numbers:
            starters.kill(number)
            shutil.rmtree(starters.cache(number))


def measure(starters: Starters, count: int, rounds: int, rate: float) -> dict[str, object]:
    """Rows for one alone and all at once."""
    alone, together = [], []
    for number in range(rounds):
        alone.append(_Round(starters, 1))
        together.append(_Round(starters, count))
        print(
            f"round {number}: alone {alone[-1].slowest:.2f} s, {count} at once {together[-1].slowest:.2f} s, "
            f"the hub sent {together[-1].of_hub:.2f} models",
            flush=True,
        )
    share = starters.model_bytes / count / rate
    one = statistics.median(each.slowest for each in alone)
    slowest = statistics.median(each.slowest for each in together)
    ratio = (slowest - share) / one
    of_hub = [round(each.of_hub, 3) for each in together]
    wrong = sum(not start.right for each in alone + together for start in each.ready)
    return {
        "models sent by the hub": _row(max(of_hub), HUB_GOAL) | {"rounds": of_hub},
        "slowest of all against one alone": _row(round(ratio, 3), READY_GOAL)
        | {"alone_seconds": round(one, 2), "seconds": round(slowest, 2), "share_seconds": round(share, 2)}
        | {"rounds": [round(each.slowest, 2) for each in together]},
        "wrong": _row(wrong, 0),
    }


class Killer:
    """Kills starters and sources while all of them start, and counts what comes of it."""

    def __init__(self, starters: Starters, count: int, generator: random.Random) -> None:
        self._starters, self._count, self._random = starters, count, generator
        self.killed = {"starter": 0, "source": 0}
        self._finished: dict[int, Ready] = {}

    def run(self, kills: int) -> dict[str, object]:
        """The row."""
        before = self._starters.hub.sent
        for number in range(self._count):
            self._starters.start(number)
        for kill in range(kills):
            self._kill_one("source" if kill % 2 else "starter", over_the_rest=kill % 4 < 2)
        failed = 0
        for number in range(self._count):
            try:
                self._finish(number)
            except RuntimeError as error:
                failed += 1
                print(error, file=sys.stderr)
        wrong = failed + sum(not start.right for start in self._finished.values())
        sent = (self._starters.hub.sent - before) / self._starters.model_bytes
        return _row(wrong, 0) | self.killed | {"starts": self._count + kills, "models sent": round(sent, 2)}

    def _finish(self, number: int) -> None:
        if number not in self._finished:
            self._finished[number] = self._starters.finish(number)

    def _fetching(self) -> list[int]:
        """Who has begun with the model and is not ready. Whoever is ready is finished with by this."""
        for number in range(self._count):
            if number not in self._finished and self._starters.is_ready(number):
                self._finish(number)
        left = [number for number in range(self._count) if number not in self._finished]
        return [number for number in left if any(self._starters.cache(number).rglob("*.part"))]

    def _kill_one(self, kind: str, *, over_the_rest: bool) -> None:
        """Kill one: a starter that has begun (a source where nobody starts), or a source when there is one."""

        def is_there() -> bool:
            fetching, sources = self._fetching(), self._finished
            return bool(sources) if kind == "source" else bool(fetching) or len(sources) == self._count

        self._starters.wait(is_there, LIMIT_SECONDS)
        time.sleep(self._random.uniform(0.0, 0.3))
        fetching, sources = self._fetching(), sorted(self._finished)
        wanted, others = (sources, fetching) if kind == "source" else (fetching, sources)
        victim = self._random.choice(wanted or others or list(range(self._count)))
        self.killed["source" if victim in self._finished else "starter"] += 1
        self._starters.kill(victim)
        if (finished := self._finished.pop(victim, None)) is not None and not finished.right:
            raise RuntimeError(f"start {victim} had wrong bytes")
        if not over_the_rest:
            shutil.rmtree(self._starters.cache(victim), ignore_errors=True)
        self._starters.start(victim)


def _row(value: float, goal: float) -> dict[str, object]:
    return {"value": value, "goal": goal, "met": value <= goal}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--starters", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--megabytes", type=int, default=100, help="of the model")
    parser.add_argument("--rate", type=float, default=20, help="megabytes per second that the hub sends")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rate = options.rate * MB
    with tempfile.TemporaryDirectory() as folder:
        starters = Starters(Path(folder), options.starters, model_bytes=options.megabytes * MB, hub_rate=rate)
        try:
            rows = measure(starters, options.starters, options.rounds, rate)
            rows["killed"] = Killer(starters, options.starters, random.Random(options.seed)).run(options.kills)
        finally:
            starters.close()
    print(json.dumps({"starters": options.starters, **rows}))


if __name__ == "__main__":
    main()
