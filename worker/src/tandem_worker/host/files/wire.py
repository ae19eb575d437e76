"""What two workers say to each other about files, after each has proven the key. Pure but for `read_exact`.

    starter ── 4 bytes: length ── JSON: Question ─────────────▶ source
            ◀─ 4 bytes: length ── JSON: header ── its payload ─

`news`: which chunks the source has that it had not when it last was asked; the payload has 20 bytes for each, its
number and the XXH3-128 of its bytes: zeros (`GONE`) when it has the chunk no longer, ones (`UNKNOWN`) before it has
computed it. `chunk`: the bytes of one. One question at a time. Whoever has the key is believed to be a worker, not to
be right: every length is bounded, every chunk is compared with its sum, and no file counts before its digest is the
hub's.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

LENGTH = struct.Struct(">I")
NEWS = struct.Struct(">I16s")
GONE = bytes(16)
UNKNOWN = b"\xff" * 16
MAX_QUESTION = 4096
MAX_HEADER = 64 << 10
MAX_IN_FLIGHT = 512
MAX_PEERS = 64
MAX_CHUNKS = 1 << 20
"""8 TiB of the largest chunks."""

PeerId = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
Fingerprint = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Port = Annotated[int, Field(ge=1, le=65535)]


class PeerQuestion(BaseModel):
    kind: Literal["news", "chunk"]
    layout: Fingerprint
    asker: PeerId
    port: Port | None = None
    """The port where the asker itself serves."""
    since: int = Field(default=0, ge=0)
    """`version` of the last news."""
    chunk: int = Field(default=0, ge=0, lt=MAX_CHUNKS)


class ReplyHeader(BaseModel):
    payload: int = Field(default=0, ge=0, le=MAX_CHUNKS * NEWS.size)
    """Bytes that follow."""
    known: bool = True
    """Whether the source has, or fetches, this layout; of a chunk, whether it has it."""
    source: PeerId = "0" * 16
    version: int = Field(default=0, ge=0)
    starting: bool = False
    """It fetches the model itself."""
    idle: bool = False
    """It has nothing left to ask a hub for."""
    in_flight: list[Annotated[int, Field(ge=0, lt=MAX_CHUNKS)]] = Field(default=[], max_length=MAX_IN_FLIGHT)
    """Chunks that it is getting from a hub."""
    peers: list[Annotated[str, Field(max_length=64)]] = Field(default=[], max_length=MAX_PEERS)
    """`ADDRESS PORT` of others that it has heard of."""
    sum: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")] = UNKNOWN.hex()
    """Checksum of the chunk."""


M = TypeVar("M", bound=BaseModel)


class WireError(Exception):
    """What arrived is not what the protocol says."""


def encode(message: PeerQuestion | ReplyHeader) -> bytes:
    """With its length in front; fields that say the default are left out."""
    text = message.model_dump_json(exclude_defaults=True).encode()
    return LENGTH.pack(len(text)) + text


def decode_question(text: bytes | bytearray) -> PeerQuestion:
    """Raises WireError."""
    return _decode(PeerQuestion, text)


def decode_header(text: bytes | bytearray) -> ReplyHeader:
    """Raises WireError."""
    return _decode(ReplyHeader, text)


def _decode(kind: type[M], text: bytes | bytearray) -> M:
    try:
        return kind.model_validate(json.loads(text))
    except (ValidationError, ValueError, RecursionError) as error:
        raise WireError(f"it is no {kind.__name__.lower()}: {type(error).__name__}") from None


def read_exact(sock: socket.socket, view: memoryview, stall_seconds: float, deadline: float) -> None:
    """Fill `view`. Raises TimeoutError when nothing comes for so long, or it is not full by `deadline` (monotonic)."""
    done = 0
    while done < len(view):
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("it is too slow")
        sock.settimeout(min(stall_seconds, left))
        count = sock.recv_into(view[done:])
        if not count:
            raise ConnectionResetError("it closed the connection")
        done += count


def pack_news(changes: list[tuple[int, bytes]]) -> bytes:
    """The payload of news: chunks' numbers, and their sums or `GONE`."""
    return b"".join(NEWS.pack(index, digest) for index, digest in changes)


def unpack_news(payload: bytes | bytearray, num_chunks: int) -> list[tuple[int, bytes]]:
    """Raises WireError when a chunk is named that there is not."""
    if len(payload) % NEWS.size:
        raise WireError("the length of its news is odd")
    changes = list(NEWS.iter_unpack(payload))
    if any(index >= num_chunks for index, _ in changes):
        raise WireError("it names a chunk that there is not")
    return changes
