"""Workers that are killed and started again over their disks, while they give each other blocks and answer two tenants.

    python -m bench.kv.kills [--kills 1000] [--minutes 60] [--seed 1]

Three workers of a small random model have little memory, a disk and peers. One of them lives through all of it. The two
others are killed in turn at random moments, three times of four with SIGKILL, else with SIGTERM, and started again over
the same disk, at the same ports. Meanwhile clients ask all three for prompts that grow like conversations, of two
tenants, and half of the requests name a worker that may have a part, or be dead. Every answer is compared with that of
a worker that had nothing cached. Now and then somebody with a salt of their own asks for a prompt that others have
asked for: nothing of it may count as cached. A restart is refused when the worker ends, is not ready, or does not use
its disk within a minute.

In the end nothing is held, disks have no more than their size and nothing unfinished, and the one that lived has no
more descriptors, threads or memory than after a tenth of the kills. It stops after so many minutes and says how many
kills there were. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.ports import free_port
from tests.tandem_worker.process.conftest import build_model
from tests.tandem_worker.process.forking import Forked, Forker

MEMORY_BYTES, DISK_BYTES = 4 << 20, 48 << 20
"""Of each worker; a token of the model takes 1 KB."""
TENANTS = ("one", "two")
ANSWER_TOKENS, SESSIONS, TURNS = 6, 16, 4
READY_SECONDS, END_SECONDS = 60.0, 60.0
"""A start that takes longer is one that was refused; an end that does, one that hangs."""
_CLIENTS = 2
_PROBES = 8
"""One request in so many is somebody's who has never asked before."""
_SPARE_DESCRIPTORS, _SPARE_THREADS, _SPARE_BYTES = 16, 8, 64 << 20
"""What the one that lives may have more in the end: connections of the moment, and what allocators keep."""


@dataclass(eq=False)
class Member:
    """A worker at its ports and on its disk, whichever process that is."""

    name: str
    folder: Path
    document: dict[str, Any]
    forker: Forker
    process: Forked | None = None
    deaths: int = 0
    """Counted before each kill and after each start: who asked across one may have got nothing."""
    read: Counter[str] = field(default_factory=Counter)
    """Tokens that came back, by tier, and other counts of processes that have ended."""

    @property
    def kv(self) -> str:
        return f"127.0.0.1:{self.document['kv']['port']}"

    @property
    def disk(self) -> Path:
        return Path(self.document["kv"]["disk"]["path"])

    def start(self) -> str | None:
        """Why it was refused; None: it serves, and its disk is in use."""
        config = self.folder / "config.json"
        config.write_text(json.dumps(self.document))
        variables = os.environ | {"POD_NAME": self.name, "POD_IP": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        variables["TERMINATION_MESSAGE_PATH"] = str(self.folder / "termination")
        arguments = ["--config", str(config), "--host", "127.0.0.1"]
        self.process = self.forker.start(arguments, variables, self.folder / "log")
        deadline, what = time.monotonic() + READY_SECONDS, "it is not ready"
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                return f"it has ended with {self.process.poll()}"
            with contextlib.suppress(OSError, LookupError):
                self.fetch("/readyz")
                what = "it does not use its disk"
                if self.measure("tandem_worker_kv_tier_ready", tier="disk") == 1:
                    self.deaths += 1
                    return None
            time.sleep(0.02)
        return what

    def end(self, number: int) -> int:
        """The exit status after this signal. One that goes on for a minute is aborted, and its log has where it was."""
        assert self.process is not None
        for each in (number, signal.SIGABRT, signal.SIGKILL):
            self.process.send_signal(each)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(END_SECONDS)
        raise RuntimeError(f"{self.name} (process {self.process.pid}) does not end though it was killed")

    def fetch(self, path: str) -> str:
        """From its metrics port. Raises OSError."""
        url = f"http://127.0.0.1:{self.document['metricsPort']}{path}"
        with urllib.request.urlopen(url, timeout=20) as answer:
            return answer.read().decode()

    def measure(self, name: str, **labels: str) -> float:
        """One metric; of several with these labels their sum. Raises OSError, LookupError."""
        lines = [line for line in self.fetch("/metrics").splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        values = [float(line.rpartition(" ")[2]) for line in lines if all(label in line for label in wanted)]
        if not values:
            raise LookupError(f"there is no {name} with {labels}")
        return sum(values)

    def count(self) -> None:
        """What its process has done until now."""
        with contextlib.suppress(OSError):
            for tier in ("disk", "peer"):
                tokens = self.measure("tandem_worker_kv_tier_tokens_total", tier=tier, direction="read")
                self.read[tier] += round(tokens)
            self.read["damaged"] += round(self.measure("tandem_worker_kv_integrity_failures_total", kind="tier"))

    def look(self) -> dict[str, int]:
        """Descriptors, threads and resident bytes of its process."""
        assert self.process is not None
        proc = Path(f"/proc/{self.process.pid}")
        pages = int((proc / "statm").read_text().split()[1])
        return {
            "descriptors": len(list((proc / "fd").iterdir())),
            "threads": len(list((proc / "task").iterdir())),
            "bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        }


class Soak:
    """The workers, and what clients have seen of them."""

    def __init__(self, members: list[Member], seed: int) -> None:
        self.members, self.seed = members, seed
        self.seen: Counter[str] = Counter()
        self.over = threading.Event()
        self._lock = threading.Lock()
        rng = random.Random(seed)
        self.prompts: list[list[int]] = []
        for _ in range(SESSIONS):
            prompt = [rng.randrange(1, 250) for _ in range(rng.randrange(60, 160))]
            for _ in range(TURNS):
                self.prompts.append(list(prompt))
                prompt += [rng.randrange(1, 250) for _ in range(rng.randrange(20, 120))]
        self.expected: list[list[int]] = []

    def learn(self) -> None:
        """What each prompt is answered with where nothing is cached."""
        for number, prompt in enumerate(self.prompts):
            tokens, cached = self.ask(self.members[0], prompt, f"alone {number}", None)
            assert cached == 0
            self.expected.append(tokens)

    def ask(self, member: Member, prompt: list[int], salt: str, source: Member | None) -> tuple[list[int], int]:
        """The answer's tokens, and how many of the prompt were cached. Raises OSError, ValueError,
        HTTPException where the worker ends within its answer."""
        body = {
            "model": "soak", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, "cache_salt": salt,
        }  # fmt: skip
        headers = {"content-type": "application/json"}
        headers |= {} if source is None else {"x-tandem-kv-source": f"{source.kv};tokens={len(prompt)}"}
        url = f"http://127.0.0.1:{member.document['httpPort']}/v1/completions"
        with urllib.request.urlopen(
            urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60
        ) as answer:
            told = json.loads(answer.read())
        return told["choices"][0]["token_ids"], told["usage"]["prompt_tokens_details"]["cached_tokens"]

    def run_client(self, number: int) -> None:
        """A thread's work until it is over."""
        rng, asked = random.Random(self.seed * 1000 + number), 0
        while not self.over.is_set():
            asked += 1
            is_probe = not asked % _PROBES
            which = rng.randrange(len(self.prompts))
            salt = f"probe {number} {asked}" if is_probe else rng.choice(TENANTS)
            member = rng.choice(self.members)
            source = rng.choice([None, *(other for other in self.members if other is not member)])
            deaths = member.deaths
            try:
                tokens, cached = self.ask(member, self.prompts[which], salt, source)
            except (OSError, ValueError, http.client.HTTPException) as error:
                if member.deaths == deaths and not deaths % 2:
                    self._note("failed", f"{member.name} did not answer: {error!r}")
                time.sleep(0.02)  # it is being started
                continue
            self._note("answers")
            if cached:
                self._note("cached")
            if tokens != self.expected[which]:
                self._note("wrong", f"prompt {which} at {member.name}: {tokens}, not {self.expected[which]}")
            if is_probe:
                self._note("probes")
                if cached:
                    self._note("leaks", f"prompt {which} of a new salt at {member.name}: {cached} tokens were cached")

    def _note(self, what: str, words: str = "") -> None:
        with self._lock:
            self.seen[what] += 1
        if words:
            print(words, file=sys.stderr, flush=True)

    def kill(self, rng: random.Random, number: int) -> bool:
        """One of those that do not live through it; False: it did not come back."""
        member = self.members[1 + number % 2]
        time.sleep(rng.uniform(0.0, 0.3))
        member.count()
        member.deaths += 1
        softly = rng.random() < 0.25
        status = member.end(signal.SIGTERM if softly else signal.SIGKILL)
        if softly and status not in (0, -signal.SIGTERM):
            words = (member.folder / "log").read_text()[-6000:]
            self._note("failed", f"kill {number}: {member.name} ended with {status} after SIGTERM\n{words}")
        refused = member.start()
        if refused is not None:
            words = (member.folder / "log").read_text()[-3000:]
            self._note("refused", f"kill {number}: {member.name} does not come back: {refused}\n{words}")
        return refused is None


@contextlib.contextmanager
def run_members(folder: Path) -> Iterator[list[Member]]:
    model = build_model(folder / "model")
    forker = Forker()
    members: list[Member] = []
    try:
        for number, name in enumerate(("lives", "falls-0", "falls-1")):
            own = folder / name
            own.mkdir()
            disk = {"path": str(own / "disk"), "sizeBytes": DISK_BYTES, "writeThrough": number == 1}
            (own / "disk").mkdir()
            document: dict[str, Any] = {
                "modelName": "soak", "servedName": "soak", "role": "unified", "revision": "r1", "device": "CPU",
                "dtype": "Float32", "model": {"uri": f"file://{model}", "cacheDir": str(folder / "cache")},
                "httpPort": free_port(), "metricsPort": free_port(), "drainTimeoutSeconds": 5,
                "kv": {"memoryBytes": MEMORY_BYTES, "port": free_port(), "peers": True, "disk": disk},
                "scheduler": {"maxBatchTokens": 128},
            }  # fmt: skip
            members.append(Member(name, own, document, forker))
            refused = members[-1].start()
            if refused is not None:
                raise RuntimeError(f"{name}: {refused}:\n{(own / 'log').read_text()[-3000:]}")
            members[-1].deaths = 0
        yield members
    finally:
        for member in members:
            if member.process is not None:
                member.process.kill()
                member.process.wait(60)
        forker.close()


def find_leftovers(members: list[Member], early: dict[str, int]) -> list[str]:
    """What should not be there when nobody asks for anything any more. `early`: of the one that lives, a while ago."""
    found: list[str] = []
    for member in members:
        deadline = time.monotonic() + 30
        while (held := member.measure("tandem_worker_kv_blocks_used")) and time.monotonic() < deadline:
            time.sleep(0.1)
        found += [f"{member.name} holds {held:.0f} blocks"] if held else []
        files = [path for path in member.disk.rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        found += [f"{member.name}'s disk has {size} bytes"] if size > DISK_BYTES else []
        found += [f"{member.name}'s disk has {path.name}" for path in files if path.suffix == ".new"]
    late = members[0].look()
    spare = {"descriptors": _SPARE_DESCRIPTORS, "threads": _SPARE_THREADS, "bytes": _SPARE_BYTES}
    found += [f"{late[what]} {what}, {early[what]} before" for what in spare if late[what] > early[what] + spare[what]]
    return found


def soak(kills: int, minutes: float, seed: int) -> dict[str, Any]:
    """What came of it."""
    with tempfile.TemporaryDirectory() as name, run_members(Path(name)) as members:
        work, rng, early = Soak(members, seed), random.Random(seed), members[0].look()
        work.learn()
        began = time.monotonic()
        threads = [threading.Thread(target=work.run_client, args=(number,)) for number in range(_CLIENTS)]
        for thread in threads:
            thread.start()
        done = 0
        try:
            while done < kills and time.monotonic() - began < 60 * minutes and work.kill(rng, done):
                done += 1
                if done == max(1, kills // 10):
                    early = members[0].look()
                if not done % 50:
                    print(f"{done} kills, {dict(work.seen)}", file=sys.stderr, flush=True)
        finally:
            work.over.set()
            for thread in threads:
                thread.join(90)
        seconds, leftovers = time.monotonic() - began, find_leftovers(members, early)
        for member in members:
            member.count()
        read = sum((member.read for member in members), Counter[str]())
    for words in leftovers:
        print(words, file=sys.stderr)
    return judge(done, seconds, work.seen, read, leftovers)


def judge(kills: int, seconds: float, seen: Counter[str], read: Counter[str], leftovers: list[str]) -> dict[str, Any]:
    """As one row. Where nothing came back from disks, or from peers, nothing is shown."""
    bad = {what: seen[what] for what in ("wrong", "failed", "refused", "leaks")}
    bad |= {"left over": len(leftovers), "damaged": read["damaged"]}
    good = {what: seen[what] for what in ("answers", "cached", "probes")}
    tokens = {tier: read[tier] for tier in ("disk", "peer")}
    row = {"kills": kills, "seconds": round(seconds), **good, "tokens read": tokens, **bad}
    return row | {"goal": 0, "value": sum(bad.values()), "met": not any(bad.values()) and all(tokens.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000, help="default 1000")
    parser.add_argument("--minutes", type=float, default=60, help="at most; default 60")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    os.environ["PYTHONFAULTHANDLER"] = "1"  # a worker that hangs says where
    row = soak(options.kills, options.minutes, options.seed)
    print(json.dumps({"killed workers with disks and peers": row}))
    if not row["met"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
