"""A TCP proxy that flips one random bit of what passes, now and then, in either direction."""

from __future__ import annotations

import contextlib
import random
import socket
import threading

_CHUNK = 65536


class FlipProxy:
    """Between decode workers and the prefill worker at `target`. Of every connection the handshake passes it too."""

    def __init__(self, target: str, seed: int, every_bytes: int) -> None:
        """One bit in `every_bytes` bytes is flipped, on average: more often in one direction, less in the other."""
        host, _, port = target.partition(":")
        self._target = (host, int(port))
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self.every_bytes = every_bytes
        self.flips = 0
        self._sockets: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._closed = False
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for sock in self._sockets:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(60)

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target, timeout=60)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            for sock in (near, far):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets |= {near, far}
            # What decode workers say is little: there more of it is damaged.
            left = [2]
            for source, sink, weight in ((near, far, 2), (far, near, 1)):
                threading.Thread(target=self._pump, args=(source, sink, weight, left), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, weight: int, left: list[int]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK):
                sink.sendall(self._damage(data, weight))
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        with self._lock:
            left[0] -= 1
            if not left[0]:
                self._sockets -= {source, sink}
                source.close()
                sink.close()

    def _damage(self, data: bytes, weight: int) -> bytes:
        with self._lock:
            if not self.every_bytes or self._random.random() >= len(data) * weight / self.every_bytes:
                return data
            self.flips += 1
            bit = self._random.randrange(8 * len(data))
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        return bytes(damaged)
