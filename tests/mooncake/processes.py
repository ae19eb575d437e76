"""Mooncake's own processes on this machine: a master, and holders that workers are clients of."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tandem_api.names import STORE_DISK_PATH
from tandem_operator.workloads.store import disk_settings
from tandem_worker.host.mooncake import find_mooncake_program

from tests.mooncake.library import plan_environment
from tests.ports import free_port

START_SECONDS = 60.0


class Program:
    """One process, which can be ended, frozen and started again at its address."""

    def __init__(
        self,
        name: str,
        port: int,
        arguments: list[str],
        folder: Path,
        environment: Mapping[str, str] | None = None,
        *,
        stands_by: bool = False,
        above: Sequence[str] = (),
    ) -> None:
        """`environment`: beside that of every program here. `stands_by`: it listens once another one has gone. `above`:
        a command that becomes it."""
        self.port, self._name = port, name
        self._command = [*above, str(find_mooncake_program(name)), *arguments, "--logtostderr"]
        self._environment = dict(environment or {})
        self._log = folder / f"{name}-{port}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._stands_by = stands_by
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """What it has written."""
        return self._log.read_text(errors="replace")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Returns once it listens, or at once where it stands by."""
        environment = plan_environment() | {
            "MC_TCP_BIND_ADDRESS": "127.0.0.1",
            "MC_TCP_PROGRESS_TIMEOUT_SEC": "1",
            "MC_TCP_STATUS_TIMEOUT_SEC": "1",
            "MC_RPC_TIMEOUT_MS": "2000",
            "MC_RPC_CONNECT_TIMEOUT_MS": "1000",
            **self._environment,
        }
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            self._await_listening()
        except BaseException:
            self.kill()
            raise

    def _await_listening(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self._stands_by:
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", self.port), 1.0):
                return
            assert self._process is not None
            assert self._process.poll() is None, self._log.read_text()[-2000:]
            assert time.monotonic() < deadline, self._log.read_text()[-2000:]
            time.sleep(0.02)

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        """As a container is ended."""
        assert self._process is not None
        self._process.terminate()
        self._process.wait(60.0)
        self._process = None

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def build_master(
    folder: Path, *, takes_disks: bool = False, etcd: str | None = None, stands_by: bool = False
) -> Program:
    """`etcd`: host:port of the one by which it takes over from another."""
    port, metrics = free_port(), free_port()
    arguments = [
        "--rpc_address=127.0.0.1",
        f"--rpc_port={port}",
        "--metrics_host=127.0.0.1",
        f"--metrics_port={metrics}",
        "--default_kv_lease_ttl=500",
        "--client_ttl=2",
    ]
    arguments += ["--enable_offload=true"] * takes_disks
    arguments += [] if etcd is None else ["--enable_ha=true", f"--etcd_endpoints={etcd}"]
    return Program("mooncake_master", port, arguments, folder, stands_by=stands_by)


def find_etcd() -> Path | None:
    """The program: that of this machine, or that of the cluster of the end-to-end tests."""
    there = shutil.which("etcd")
    built = sorted((Path(__file__).parents[2] / ".cache" / "bin").glob("etcd-*/etcd"))
    return Path(there) if there is not None else next(iter(built), None)


@contextlib.contextmanager
def run_etcd(program: Path, folder: Path) -> Iterator[str]:
    """Its host:port."""
    client, peers = (f"127.0.0.1:{free_port()}" for _ in range(2))
    command = [str(program), f"--data-dir={folder / 'etcd'}", "--unsafe-no-fsync"]
    command += [f"--listen-client-urls=http://{client}", f"--advertise-client-urls=http://{client}"]
    command += [f"--listen-peer-urls=http://{peers}", f"--initial-advertise-peer-urls=http://{peers}"]
    command.append(f"--initial-cluster=default=http://{peers}")
    with (
        (folder / "etcd.log").open("ab") as log,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as process,
    ):
        try:
            yield client
        finally:
            process.kill()


def build_holder(
    folder: Path,
    master: Program | str,
    megabytes: int = 64,
    *,
    disk: Path | None = None,
    disk_megabytes: int = 64,
    above: Sequence[str] = (),
    more: Sequence[str] = (),
) -> Program:
    """`master`: or its address. `disk`: a folder for a file of so many megabytes, with the settings of a pod, but names
    of what is there are written at once and not every minute. `more`: arguments."""
    port = free_port()
    arguments = [
        "--host=127.0.0.1",
        f"--port={port}",
        f"--master_server_address={master if isinstance(master, str) else master.address}",
        "--metadata_server=P2PHANDSHAKE",
        f"--global_segment_size={megabytes} MB",
        "--threads=2",
        *more,
    ]
    if disk is None:
        return Program("mooncake_client", port, arguments, folder, above=above)
    settings = {
        name: value.replace(STORE_DISK_PATH, str(disk)) for name, value in disk_settings(disk_megabytes << 20).items()
    }
    settings["MOONCAKE_OFFSET_PERSIST_MODE"] = "strict"
    return Program("mooncake_client", port, [*arguments, "--enable_offload=true"], folder, settings, above=above)


@contextlib.contextmanager
def run_store(folder: Path, megabytes: int = 64, *, disk: Path | None = None) -> Iterator[tuple[Program, Program]]:
    """A master and a holder; `disk`: the holder's folder on one."""
    programs: list[Program] = []
    try:
        programs.append(build_master(folder, takes_disks=disk is not None))
        programs.append(build_holder(folder, programs[0], megabytes, disk=disk))
        yield programs[0], programs[1]
    finally:
        for program in reversed(programs):
            program.kill()
