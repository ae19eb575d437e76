"""Starts that are killed at random times over one cache folder: none that comes up computes anything else.

    python -m bench.start.kills [--starts 500] [--seed 1]

Most starts are killed (SIGKILL) somewhere between exec and the end of their writing of a prepared copy; every tenth is
left alone until a copy is there, answers the same prompt, and must say what the first one said. Before half of
them a byte of what lies in the cache is changed, or a file is cut short. In the end only whole copies may be left,
and no more of them than one start makes. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from bench.start.process import LIMIT_SECONDS, ask, describe, running
from e2e.model import find_model
from tests.ports import free_port

HERE = Path(__file__).parents[2]
TOKENS = 24
UNFINISHED_LIMIT = 40
"""Files that killed starts may leave until they are old enough to be removed."""


def answer(model: Path, cache: Path) -> bytes:
    """What a whole start says. Raises RuntimeError when it does not come up."""
    port = free_port()
    with running(HERE, describe(model, cache, port)) as (process, log):
        began = time.monotonic()
        while not (told := ask(port, TOKENS)):
            if process.poll() is not None or time.monotonic() - began > LIMIT_SECONDS:
                raise RuntimeError(f"a start failed:\n{log.read_text()[-3000:]}")
            time.sleep(0.02)
        while not whole_copies(cache):
            if time.monotonic() - began > LIMIT_SECONDS:
                raise RuntimeError(f"a start keeps no copy:\n{log.read_text()[-3000:]}")
            time.sleep(0.1)
        choice = json.loads(told)["choices"][0]
        return json.dumps([choice["text"], choice["finish_reason"]]).encode()


def whole_copies(cache: Path) -> list[Path]:
    """Prepared copies that are not under way."""
    return [file for file in Path(cache, ".prepared").glob("*") if file.name.startswith("weights")]


def kill(model: Path, cache: Path, seconds: float) -> None:
    """A start that is killed after so long."""
    with running(HERE, describe(model, cache, free_port())) as (process, _):
        time.sleep(seconds)
        process.kill()
        process.wait()


def damage(cache: Path, generator: random.Random) -> None:
    """Change a byte of a file of the cache, or cut it."""
    files = [file for file in sorted(cache.rglob("*")) if file.is_file() and file.stat().st_size]
    if not files:
        return
    file = generator.choice(files)
    size = file.stat().st_size
    with file.open("r+b") as content:
        if generator.random() < 0.3:
            content.truncate(generator.randrange(size))
            return
        content.seek(generator.randrange(size))
        byte = content.read(1)
        content.seek(-1, 1)
        content.write(bytes([byte[0] ^ 1 << generator.randrange(8)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--starts", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    generator, model = random.Random(options.seed), find_model()
    wrong, damaged, whole = 0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        began = time.monotonic()
        expected = answer(model, cache)
        longest = time.monotonic() - began
        for number in range(1, options.starts):
            if generator.random() < 0.5:
                damaged += 1
                damage(cache, generator)
            if number % 10:
                kill(model, cache, generator.uniform(0.0, longest))
                continue
            whole += 1
            if answer(model, cache) != expected:
                wrong += 1
                print(f"start {number} of seed {options.seed} says something else", file=sys.stderr)
        files = [file for file in cache.rglob("*") if file.is_file()]
        left = sum(file.name.startswith(".unfinished-") for file in files)
        size = sum(file.stat().st_size for file in files if not file.name.startswith(".unfinished-"))
    met = wrong == 0 and left <= UNFINISHED_LIMIT and size < 1 << 30
    row = {"starts": options.starts, "whole": whole, "damaged": damaged, "wrong": wrong, "unfinished": left}
    print(json.dumps({"killed starts": row | {"bytes": size, "goal": 0, "value": wrong, "met": met}}))


if __name__ == "__main__":
    main()
