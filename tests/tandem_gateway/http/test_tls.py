"""Clients over TLS: what they get, whose handshakes are refused, and certificates that change."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import openai
import pytest
from tandem_api.launch import ClientTLS
from tandem_gateway.errors import ConfigError
from tandem_gateway.http import tls as tls_module
from tandem_gateway.http.tls import HANDSHAKES_PER_TURN, Certificate, Handshakes
from tandem_gateway.process.settings import parse_settings

MESSAGES = [{"role": "user", "content": "hi"}]
PIECE = b"x" * 65536
SIZE = 320 * len(PIECE)
LARGE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % SIZE


def openssl(*arguments: object, text: str = "") -> str:
    command = ["openssl", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, input=text).stdout


def make_certificate(folder: Path, name: str, *options: str) -> Path:
    """A certificate and its key in a new folder."""
    folder.mkdir()
    openssl(
        "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", f"/CN={name}",
        "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-days", "2",
        "-keyout", folder / "tls.key", "-out", folder / "tls.crt", *options,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("certificates")
    return {name: make_certificate(base / name, name) for name in ("first", "second")}


class Mount:
    """A folder with a Secret's files, as a kubelet keeps it: they change together, by one rename."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._count = 0
        path.mkdir()
        for name in ("tls.crt", "tls.key"):
            (path / name).symlink_to(f"..data/{name}")

    def put(self, certificate: Path, key: Path | None = None) -> None:
        self._count += 1
        content = self.path / f"..{self._count}"
        content.mkdir()
        shutil.copy(certificate / "tls.crt", content)
        shutil.copy((key or certificate) / "tls.key", content)
        fresh = self.path / "..data_tmp"
        fresh.symlink_to(content.name)
        fresh.rename(self.path / "..data")


@pytest.fixture
def mount(tmp_path: Path, certificates: dict[str, Path]) -> Mount:
    made = Mount(tmp_path / "tls")
    made.put(certificates["first"])
    return made


@pytest.fixture
def told(mount: Mount) -> ClientTLS:
    return ClientTLS(path=str(mount.path), port=0)


def trusting(*folders: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for folder in folders:
        context.load_verify_locations(folder / "tls.crt")
    return context


def careless() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


Connect = Callable[..., object]


@pytest.fixture
async def connect_tls() -> AsyncIterator[Connect]:
    writers: list[asyncio.StreamWriter] = []

    async def open_one(port: int, context: ssl.SSLContext | None = None, *, limit: int = 65536):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context or careless(), limit=limit)
        writers.append(writer)
        return reader, writer

    yield open_one
    for writer in writers:
        writer.transport.abort()
    await asyncio.sleep(0)


async def send_large(worker, request, writer: asyncio.StreamWriter) -> None:
    writer.write(LARGE)
    for _ in range(SIZE // len(PIECE)):
        writer.write(PIECE)
        await writer.drain()


async def shown_name(port: int) -> str:
    """The name on the certificate that a new client is shown."""
    pem = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))
    text = await asyncio.to_thread(openssl, "x509", "-noout", "-subject", text=pem)
    return text.rpartition("=")[2].strip()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_the_openai_client(start_gateway, start_worker, told, certificates, version) -> None:
    running = await start_gateway(await start_worker(), tls=told)
    assert running.server.http_port == 0
    context = trusting(certificates["first"])
    context.maximum_version = context.minimum_version = version
    http = httpx.AsyncClient(verify=context)
    url = f"https://localhost:{running.server.https_port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, http_client=http) as client:
        for _ in range(3):
            answer = await client.chat.completions.create(model="toy", messages=MESSAGES, max_tokens=3)
            assert answer.choices[0].message.content == "t0 t1 t2 "
        stream = await client.chat.completions.create(model="toy", messages=MESSAGES, max_tokens=5, stream=True)
        text = "".join([chunk.choices[0].delta.content async for chunk in stream])
        assert text == "t0 t1 t2 t3 t4 "
        with pytest.raises(openai.APIStatusError) as caught:
            await client.completions.create(model="toy", prompt="x" * 10_485_760)
        assert caught.value.status_code == 413
    assert running.gateway.certificate.handshakes["ok"] >= 1


async def test_plain_http_beside_tls_where_it_is_asked_for(start_gateway, start_worker, told, chat) -> None:
    running = await start_gateway(await start_worker(), tls=told.model_copy(update={"plain_http": True}))
    assert b"200 OK" in await running.raw(chat(headers="connection: close\r\n"))


async def test_a_client_that_speaks_plain_http_is_told_so(start_gateway, start_worker, told, chat, connect) -> None:
    worker = await start_worker()
    running = await start_gateway(worker, tls=told)
    reader, writer = await connect(running.server.https_port)
    writer.write(chat())
    async with asyncio.timeout(30):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "tls_required"
    assert "https://" in json.loads(body)["error"]["message"]
    assert not worker.received
    reader, writer = await connect(running.server.https_port)
    writer.write(b"\x00\x01 neither")
    async with asyncio.timeout(30):
        await drained(reader)
    assert running.gateway.certificate.handshakes == {"plain": 2}


@pytest.mark.parametrize(
    ("least", "offered", "accepted"),
    [
        ("TLS1.2", ssl.TLSVersion.TLSv1_1, False),
        ("TLS1.2", ssl.TLSVersion.TLSv1_2, True),
        ("TLS1.3", ssl.TLSVersion.TLSv1_2, False),
        ("TLS1.3", ssl.TLSVersion.TLSv1_3, True),
    ],
)
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
async def test_old_versions_are_refused(start_gateway, told, connect_tls, least, offered, accepted) -> None:
    running = await start_gateway(tls=told.model_copy(update={"min_version": least}))
    context = careless()
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    context.minimum_version = context.maximum_version = offered
    if accepted:
        await connect_tls(running.server.https_port, context)
        return
    with pytest.raises(ssl.SSLError, match=r"(?i)protocol.version"):
        await connect_tls(running.server.https_port, context)
    assert running.gateway.certificate.handshakes == {"failed": 1}


async def test_http1_is_what_is_agreed_on(start_gateway, told, connect_tls) -> None:
    running = await start_gateway(tls=told)
    context = careless()
    context.set_alpn_protocols(["h2", "http/1.1"])
    _, writer = await connect_tls(running.server.https_port, context)
    assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"


async def test_another_certificate_under_load(
    start_gateway, start_worker, fault, told, mount, certificates, connect_tls, chat, until
) -> None:
    """Not one request fails, connections stay, and who connects afterwards gets the new one."""
    slow = await start_worker(default=fault.stream(3000, then="eof", pause=0.001))
    running = await start_gateway(slow, tls=told)
    port, both = running.server.https_port, trusting(*certificates.values())
    reader, writer = await connect_tls(port, both)
    writer.write(chat(stream=True))
    await reader.readuntil(b"t0 ")
    slow.default = None
    answered, stopping = [], asyncio.Event()

    async def load() -> None:
        while not stopping.is_set():
            async with httpx.AsyncClient(verify=both) as client:
                for _ in range(2):
                    body = {"model": "toy", "messages": MESSAGES}
                    answer = await client.post(f"https://localhost:{port}/v1/chat/completions", json=body)
                    answered.append(answer.status_code)

    clients = [asyncio.create_task(load()) for _ in range(3)]
    for name in ("second", "first", "second"):
        mount.put(certificates[name])
        loads = running.gateway.certificate.loads["ok"]
        await until(lambda loads=loads: running.gateway.certificate.loads["ok"] > loads)
        assert await shown_name(port) == name
        before = len(answered)
        await until(lambda before=before: len(answered) > before)
    stopping.set()
    await asyncio.gather(*clients)
    assert set(answered) == {200}
    writer.transport.abort()


async def test_a_broken_pair_keeps_the_certificate_from_before(
    start_gateway, told, mount, certificates, until, caplog
) -> None:
    running = await start_gateway(tls=told)
    port, certificate = running.server.https_port, running.gateway.certificate
    expires = certificate.expires_at
    assert abs(expires - time.time() - 2 * 86400) < 600
    mount.put(certificates["second"], key=certificates["first"])
    await until(lambda: certificate.loads["failed"] == 1)
    assert await shown_name(port) == "first"
    assert "key values mismatch" in caplog.records[-1].reason
    (mount.path / "..2" / "tls.key").write_text("")
    await until(lambda: certificate.loads["failed"] == 2)
    (mount.path / "..data").unlink()
    await until(lambda: certificate.loads["failed"] == 3)
    await asyncio.sleep(1.2)
    assert certificate.loads == {"failed": 3}, "what is missing is said once"
    text = running.server.reports.render_metrics().decode()
    assert f"tandem_gateway_tls_certificate_expiry_timestamp_seconds {expires / 1e9!r}e+09" in text
    assert 'tandem_gateway_tls_certificate_loads_total{result="failed"} 3.0' in text
    mount.put(certificates["second"])
    await until(lambda: certificate.loads["ok"] == 1)
    assert await shown_name(port) == "second"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("missing", "No such file"),
        ("mismatch", "key values mismatch"),
        ("garbage", "no start line|pem lib"),
        ("purpose", "purpose"),
        ("password", "encrypted"),
    ],
)
def test_what_cannot_be_used_at_the_start(tmp_path: Path, certificates, fault: str, words: str) -> None:
    folder = tmp_path / "tls"
    if fault == "purpose":
        make_certificate(folder, "client", "-addext", "extendedKeyUsage=clientAuth")
    elif fault != "missing":
        shutil.copytree(certificates["first"], folder)
    if fault == "mismatch":
        shutil.copy(certificates["second"] / "tls.key", folder)
    elif fault == "garbage":
        (folder / "tls.crt").write_text("what is this")
    elif fault == "password":
        key = certificates["first"] / "tls.key"
        openssl("ec", "-in", key, "-aes128", "-passout", "pass:secret", "-out", folder / "tls.key")
    with pytest.raises(ConfigError, match=f"tls.crt and tls.key in .*(?i:{words})"):
        Certificate(str(folder), min_version="TLS1.2")


def test_an_expired_certificate_is_used_and_says_so(tmp_path: Path) -> None:
    """Refusing it would only take away those clients that do not look."""
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "index.txt").touch()
    (folder / "serial").write_text("01")
    (folder / "conf").write_text(
        f"[ca]\ndefault_ca=d\n[d]\ndatabase={folder}/index.txt\nserial={folder}/serial\nnew_certs_dir={folder}\n"
        "default_md=sha256\npolicy=p\n[p]\ncommonName=supplied\n"
    )
    key, request = folder / "tls.key", folder / "request"
    openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=old", "-keyout", key, "-out", request)
    openssl(
        "ca", "-batch", "-selfsign", "-config", folder / "conf", "-keyfile", key, "-in", request, "-notext",
        "-startdate", "20200101000000Z", "-enddate", "20200102000000Z", "-out", folder / "tls.crt",
    )  # fmt: skip
    assert Certificate(str(folder), min_version="TLS1.2").expires_at == 1577923200


async def test_stalled_handshakes(start_gateway, start_worker, told, connect, connect_tls, chat, until) -> None:
    """They count as connections, and delay nobody, for they stay a minute."""
    running = await start_gateway(
        await start_worker(), tls=told, timeouts={"header_seconds": 60.0}, max_connections=400
    )
    port, hello = running.server.https_port, client_hello()
    stalled = [await connect(port) for _ in range(300)]
    for index, (_, writer) in enumerate(stalled):
        if index % 3:
            writer.write(hello if index % 3 == 1 else hello[:20])
    reader, writer = await connect_tls(port)
    # What the kernel has taken is not yet accepted.
    await until(lambda: len(running.server.reception.connections) >= 300, wait=60)
    assert len(running.server.reception.connections) <= 301
    for _ in range(5):
        writer.write(chat())
        await reader.readuntil(b"\r\n\r\n")
    assert len(running.server.reception.connections) >= 300, "nobody waited for their end"
    for _, writer in stalled:
        writer.transport.abort()


async def test_stalled_handshakes_end_by_the_deadline_of_headers(start_gateway, start_worker, told, connect) -> None:
    running = await start_gateway(await start_worker(), tls=told, timeouts={"header_seconds": 1.0})
    hello, begun = client_hello(), time.monotonic()
    stalled = [await connect(running.server.https_port) for _ in range(30)]
    for index, (_, writer) in enumerate(stalled):
        if index % 3:
            writer.write(hello if index % 3 == 1 else hello[:20])
    async with asyncio.timeout(60):
        for reader, _ in stalled:
            await drained(reader)
    assert time.monotonic() - begun >= 0.9
    assert running.gateway.certificate.handshakes["unfinished"] == 20


async def test_the_oldest_handshake_is_given_up_for_a_new_one(
    start_gateway, start_worker, told, connect, connect_tls, chat, monkeypatch
) -> None:
    monkeypatch.setattr(tls_module, "MAX_UNFINISHED", 3)
    running = await start_gateway(await start_worker(), tls=told)
    stalled = [await connect(running.server.https_port) for _ in range(3)]
    for _, writer in stalled:
        writer.write(client_hello()[:20])
    reader, writer = await connect_tls(running.server.https_port)
    async with asyncio.timeout(30):
        writer.write(chat())
        await reader.readuntil(b"\r\n\r\n")
        await drained(stalled[0][0])
        _, held = await connect_tls(running.server.https_port)
        writer.write(chat(headers="connection: close\r\n"))
        await drained(reader)
    assert running.gateway.certificate.handshakes == {"ok": 2, "unfinished": 1}
    assert not held.is_closing()


async def test_connections_beyond_the_limit_are_told_so(start_gateway, told, connect, connect_tls) -> None:
    running = await start_gateway(tls=told, max_connections=1)
    await connect(running.server.https_port)
    reader, _ = await connect_tls(running.server.https_port)
    async with asyncio.timeout(30):
        assert b"gateway_full" in await reader.read()


def client_hello() -> bytes:
    out = ssl.MemoryBIO()
    try:
        careless().wrap_bio(ssl.MemoryBIO(), out).do_handshake()
    except ssl.SSLWantReadError:
        return out.read()
    raise AssertionError("a handshake takes two")


async def drained(reader: asyncio.StreamReader) -> None:
    try:
        await reader.read()
    except ConnectionResetError:
        return


async def test_a_turn_of_the_loop_does_a_few_handshakes() -> None:
    loop, done, turns = asyncio.get_running_loop(), [], []
    handshakes = Handshakes(loop)

    loop.set_exception_handler(lambda *_: None)

    class Client:
        def shake(self) -> None:
            done.append(self)
            if len(done) == 2:
                raise ValueError("a defect, which is the end of this client alone")

    for _ in range(3 * HANDSHAKES_PER_TURN):
        handshakes.add(Client())  # type: ignore[arg-type]
    while len(done) < 3 * HANDSHAKES_PER_TURN:
        await asyncio.sleep(0)
        turns.append(len(done))
    assert max(after - before for before, after in zip([0, *turns], turns, strict=False)) <= HANDSHAKES_PER_TURN


async def test_a_client_that_reads_nothing_is_held_back(start_gateway, start_worker, fault, told, chat) -> None:
    sent: list[int] = []
    running = await start_gateway(await start_worker(default=fault.flood(sent)), tls=told)
    client = socket.create_connection(("127.0.0.1", running.server.https_port))
    client = await asyncio.to_thread(careless().wrap_socket, client)
    client.sendall(chat(stream=True))
    before = -1
    async with asyncio.timeout(60):
        while before != len(sent):
            before = len(sent)
            await asyncio.sleep(0.3)
    assert 0 < sum(sent) < 24_000_000  # the sockets' own buffers
    client.close()


async def test_a_client_that_leaves_ends_its_request(
    start_gateway, start_worker, fault, told, chat, connect_tls, until
) -> None:
    worker = await start_worker(default=fault.hang)
    running = await start_gateway(worker, tls=told)
    _, writer = await connect_tls(running.server.https_port)
    writer.write(chat())
    await until(lambda: worker.answering)
    writer.close()
    await until(lambda: worker.cancelled == 1)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_the_end_of_an_answer_is_the_end_of_the_connection(
    start_gateway, start_worker, told, chat, version
) -> None:
    """Said as TLS says it, so that nobody can cut an answer short unnoticed."""
    running = await start_gateway(await start_worker(default=send_large), tls=told)
    request = chat(headers="connection: close\r\n").replace(b"HTTP/1.1", b"HTTP/" + version.encode(), 1)

    def ask() -> int:
        plain = socket.create_connection(("127.0.0.1", running.server.https_port))
        # An end that TLS did not announce is an error here.
        with careless().wrap_socket(plain, suppress_ragged_eofs=False) as client:
            client.sendall(request)
            time.sleep(0.5)
            received = b"".join(iter(lambda: client.recv(1 << 20), b""))
        return len(received.partition(b"\r\n\r\n")[2])

    assert await asyncio.to_thread(ask) == SIZE


async def test_a_refusal_reaches_who_still_sends(start_gateway, start_worker, told) -> None:
    running = await start_gateway(await start_worker(), tls=told)

    def ask() -> bytes:
        plain = socket.create_connection(("127.0.0.1", running.server.https_port))
        with careless().wrap_socket(plain) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n")
            for _ in range(100):
                client.sendall(b"x" * 100_000)
            return client.recv(65536)

    assert b" 413 " in await asyncio.to_thread(ask)


async def test_draining_waits_for_slow_clients(launch, start_worker, chat, told, connect_tls) -> None:
    worker = await start_worker(default=send_large)
    process = await launch("--worker", f"url=127.0.0.1:{worker.port}", "--lame-duck", "0", tls=told)
    reader, writer = await connect_tls(process.https_port, limit=1024)
    writer.write(chat())
    await reader.readuntil(b"\r\n\r\n")
    process.process.send_signal(signal.SIGTERM)
    await asyncio.sleep(1.0)
    async with asyncio.timeout(60):
        await reader.readexactly(SIZE)
        stdout, _ = await process.process.communicate()
    assert process.process.returncode == 0
    assert [json.loads(line)["status"] for line in stdout.splitlines()] == [200]


def test_flags_without_kubernetes() -> None:
    worker = ["--worker", "role=decode,url=127.0.0.1:1"]
    assert parse_settings(worker).config.tls is None
    told = parse_settings([*worker, "--tls", "/certificates", "--tls-port", "9443"]).config.tls
    assert told == ClientTLS(path="/certificates", port=9443)
    both = parse_settings([*worker, "--tls", "/certificates", "--plain-http"]).config.tls
    assert both == ClientTLS(path="/certificates", plain_http=True)
