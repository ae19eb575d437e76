"""Doors on loopback, and who knocks at them."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from tandem_api.keys import KEY_BYTES, KeyRing
from tandem_worker.host.peers.dial import dial
from tandem_worker.host.peers.door import Door
from tandem_worker.host.peers.handshake import Purpose
from tandem_worker.host.vitals import Vitals


def make_ring(*names: str) -> KeyRing:
    """The first name is the primary key's."""
    return KeyRing(primary=names[0], keys={name: secrets.token_bytes(KEY_BYTES) for name in names})


def eventually(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@dataclass
class Entrance:
    door: Door
    port: int
    listener: socket.socket
    vitals: Vitals
    ring: KeyRing
    admitted: list[socket.socket] = field(default_factory=list)

    def knock(self, source: str = "127.0.0.1") -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), 60, source_address=(source, 0))

    def dial(self, ring: KeyRing | None = None, purpose: Purpose = Purpose.KV, seconds: float = 30.0) -> socket.socket:
        return dial("127.0.0.1", self.port, ring or self.ring, purpose, seconds=seconds)


@pytest.fixture
def ring() -> KeyRing:
    return make_ring("k1")


@pytest.fixture
def open_door(ring: KeyRing) -> Iterator[Callable[..., Entrance]]:
    entrances: list[Entrance] = []

    def open_one(**options: object) -> Entrance:
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        vitals, port = Vitals(), listener.getsockname()[1]

        def admit(sock: socket.socket, name: str) -> None:
            entrance.admitted.append(sock)

        settings = {"ring": lambda: entrance.ring, "purpose": Purpose.KV, "admit": admit, "vitals": vitals} | options
        entrance = Entrance(Door(listener, **settings), port, listener, vitals, ring)
        entrances.append(entrance)
        entrance.door.start()
        return entrance

    yield open_one
    for entrance in entrances:
        entrance.door.close()
        for sock in entrance.admitted:
            sock.close()
