"""Bytes that change between two holders are found, counted and computed: somebody stands in between who changes one in
each block that passes."""

from __future__ import annotations

import contextlib
import random
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mooncake.processes import Program, build_holder, build_master
from tests.tandem_worker.tiers.mooncake.rig import StoreRig
from tests.tandem_worker.tiers.mooncake.test_faults import BLOCK_BYTES, MAGIC, refill, serve

OWN = "127.0.0.5"
"""Whose connections are let through as they are."""


class Meddler:
    """Listens in place of a port of loopback, and hands on what comes."""

    def __init__(self, port: int) -> None:
        self._target, self._rng = ("127.0.0.1", port), random.Random(port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self.changed = 0
        """Bytes."""
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for each in [self._server, *self._open]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                asker, _ = self._server.accept()
                answerer = socket.create_connection(self._target, source_address=(OWN, 0))
                self._open += [asker, answerer]
                threading.Thread(target=self._pass, args=(asker, answerer, False), daemon=True).start()
                threading.Thread(target=self._pass, args=(answerer, asker, True), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, meddle: bool) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 20)):
                place = data.find(MAGIC) if meddle else -1
                while place >= 0:
                    changed = place + self._rng.choice(
                        [self._rng.randrange(48), 4096 + self._rng.randrange(BLOCK_BYTES)]
                    )
                    if changed < len(data):
                        data[changed] ^= 1 << self._rng.randrange(8)
                        self.changed += 1
                    place = data.find(MAGIC, place + 4096)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def meddle_with(holder: Program) -> Iterator[Meddler]:
    """With what others read from this holder."""
    found = re.search(r"TcpTransport: listen on port (\d+)", holder.log)
    assert found is not None
    meddler = Meddler(int(found.group(1)))
    rule = ["OUTPUT", "!", "-s", OWN, "-p", "tcp", "--dport", found.group(1), "-j", "REDIRECT"]
    rule += ["--to-ports", str(meddler.port)]
    table = ["iptables", "-w", "-t", "nat"]
    made = subprocess.run([*table, "-A", *rule], capture_output=True, text=True, check=False)
    try:
        if made.returncode:
            pytest.skip(f"connections cannot be redirected here: {made.stderr.strip()}")
        yield meddler
    finally:
        if not made.returncode:
            subprocess.run([*table, "-D", *rule], check=True)
        meddler.close()


@pytest.mark.skipif(shutil.which("iptables") is None, reason="connections are redirected by iptables")
@pytest.mark.parametrize("num_prompts", [4, pytest.param(100, marks=pytest.mark.full)])
def test_bytes_that_change_on_the_wire_are_found_and_computed_again(tmp_path: Path, num_prompts: int) -> None:
    master = build_master(tmp_path)
    other = build_holder(tmp_path, master)
    writer = StoreRig(other.address, num_blocks=64 + 16 * num_prompts)
    for seed in range(num_prompts):
        refill(writer, seed)
    writer.close()
    own = build_holder(tmp_path, master)
    try:
        with meddle_with(other) as meddler:
            rig = StoreRig(own.address, num_blocks=64 + 16 * num_prompts)
            for seed in range(num_prompts):
                serve(rig, f"w{seed}", seed)
            assert meddler.changed >= 10 * num_prompts
            assert rig.tier.stats().integrity_failures >= num_prompts
            assert rig.tier.stats().tokens_read < 40 * num_prompts
            rig.close()
    finally:
        for each in (own, other, master):
            each.kill()
