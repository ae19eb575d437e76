"""The files' port against strangers, and against peers that have the key and break the protocol."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tandem_api import names
from tandem_api.keys import KEY_BYTES, KeyRing
from tandem_api.launch import FileSharing, ModelSource, WorkerConfig
from tandem_worker.host.errors import AuthenticationError
from tandem_worker.host.files.exchange import FileExchange
from tandem_worker.host.files.layout import Layout, SharedFile
from tandem_worker.host.files.share import SharedFiles
from tandem_worker.host.files.wire import LENGTH
from tandem_worker.host.runtime import open_runtime
from tandem_worker.host.vitals import Vitals
from tandem_worker.model.sources.swarm.peer import PeerLink

CONTENT = secrets.token_bytes((1 << 20) + 5)
LAYOUT = Layout("org/model", "c" * 40, [SharedFile("w", len(CONTENT), "d" * 64)])


def ring() -> KeyRing:
    return KeyRing(primary="a", keys={"a": secrets.token_bytes(KEY_BYTES)})


@pytest.fixture
def source(tmp_path: Path) -> Iterator[FileExchange]:
    (tmp_path / "w").write_bytes(CONTENT)
    keys = ring()
    exchange = FileExchange(FileSharing(enabled=True, port=0), [], lambda: keys, Vitals())
    exchange.open("127.0.0.1")
    share = SharedFiles(LAYOUT, {0: tmp_path / "w"})
    share.add(0)
    share.add(1)
    exchange.offer(share)
    yield exchange
    exchange.close()


def connect(source: FileExchange, keys: KeyRing | None = None) -> PeerLink:
    return PeerLink(("127.0.0.1", source.port), LAYOUT, (lambda: keys) if keys else source.ring, "b" * 16, 1)


def assert_serves(source: FileExchange) -> None:
    link = connect(source)
    got = [link.chunk(index, 10.0) for index in range(2)]
    link.close()
    assert b"".join(bytes(part[0]) for part in got if part) == CONTENT


def test_a_stranger_gets_nothing(source: FileExchange) -> None:
    with pytest.raises((AuthenticationError, OSError)):
        connect(source, ring())
    assert source.sample().bytes_sent == 0
    assert_serves(source)


@pytest.mark.parametrize(
    "words",
    [
        LENGTH.pack(0),
        LENGTH.pack(1 << 30),
        LENGTH.pack(4) + b"\xff\xff\xff\xff",
        LENGTH.pack(2) + b"{}",
        LENGTH.pack(4000) + b"[" * 4000,
        LENGTH.pack(len(b'{"kind":"chunk","chunk":-1}')) + b'{"kind":"chunk","chunk":-1}',
    ],
)
def test_a_peer_that_breaks_the_protocol_is_cut_off_and_others_are_served(source: FileExchange, words: bytes) -> None:
    link = connect(source)
    sock: socket.socket = link._sock
    sock.settimeout(60)
    sock.sendall(words)
    with contextlib.suppress(ConnectionResetError):
        assert sock.recv(1) == b""
    link.close()
    assert_serves(source)


def test_a_chunk_that_there_is_not_is_answered_with_nothing(source: FileExchange) -> None:
    link = connect(source)
    header = link._ask("chunk", 1e12, chunk=LAYOUT.num_chunks)
    assert (header.known, header.payload) == (False, 0)
    link.close()
    assert_serves(source)


@pytest.mark.parametrize(
    ("uri", "sharing", "with_keys", "shares"),
    [
        ("hf://a/b", None, True, False),
        ("hf://a/b", FileSharing(), True, False),
        ("hf://a/b", FileSharing(enabled=True), True, True),
        ("pvc://claim/a", FileSharing(enabled=True), True, False),
        ("hf://a/b", FileSharing(enabled=True), False, False),
    ],
)
def test_files_are_exchanged_only_where_that_is_switched_on_and_there_are_keys(
    uri: str,
    sharing: FileSharing | None,
    with_keys: bool,
    shares: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in (names.PEERS_KEY_FILE, names.API_KEY_FILE):
        (tmp_path / name).write_text(ring().encode())
    model = ModelSource(uri=uri, revision="main", sharing=sharing)
    keys_path = str(tmp_path) if with_keys else None
    config = WorkerConfig.model_construct(model_name="m", model=model, keys_path=keys_path, role="decode", revision="r")
    assert (open_runtime(config, "127.0.0.1").files is not None) is shares
    wanted = sharing is not None and sharing.enabled and not with_keys
    assert ("without keys the model's files are not shared with other workers" in caplog.messages) is wanted


def test_the_rate_follows_a_stream_that_begins_at_once(source: FileExchange) -> None:
    busy = False
    source.watch(lambda: busy)
    assert source.limit == FileSharing().idle_bytes_per_second
    busy = True
    assert source.limit == source.sample().limit == FileSharing().busy_bytes_per_second
