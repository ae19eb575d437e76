"""A program that ends is started again; what keeps it from running is said; SIGTERM ends both."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from tests.mooncake.library import plan_environment
from tests.mooncake.processes import find_port

COMMAND = [sys.executable, "-m", "tandem_worker.tiers.mooncake.program"]


def read_until(process: subprocess.Popen[str], words: str) -> str:
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if words in line:
            return said
    raise AssertionError(said)


def test_a_holder_without_a_master_is_tried_again_and_ends_when_it_is_told_to() -> None:
    port = find_port()
    arguments = ["mooncake_client", "--host=127.0.0.1", f"--port={port}", "--metadata_server=P2PHANDSHAKE"]
    arguments += [f"--master_server_address=127.0.0.1:{find_port()}", "--global_segment_size=16 MB", "--logtostderr"]
    environment = plan_environment() | {"MC_STORE_CLIENT_SETUP_RETRIES": "1"}
    with subprocess.Popen([*COMMAND, *arguments], env=environment, stderr=subprocess.PIPE, text=True) as process:
        read_until(process, "mooncake_client has ended with status")
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_a_machine_without_its_libraries_says_so_and_stays() -> None:
    code = (
        "from tandem_worker.tiers.mooncake import program\n"
        "program.find_mooncake_obstacle = lambda: 'it lacks libtandem'\n"
        "import sys; sys.argv = ['program', 'mooncake_master']\n"
        "program.main()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as process:
        said = read_until(process, "cannot run here")
        assert said == "mooncake_master cannot run here: it lacks libtandem\n"
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_a_program_that_runs_ends_with_this_one() -> None:
    port = find_port()
    arguments = ["mooncake_master", "--rpc_address=127.0.0.1", f"--rpc_port={port}", "--metrics_host=127.0.0.1"]
    arguments += [f"--metrics_port={find_port()}", "--logtostderr"]
    with subprocess.Popen([*COMMAND, *arguments], env=plan_environment(), stderr=subprocess.PIPE, text=True) as process:
        read_until(process, "Master service started")
        (child,) = find_children(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    deadline = time.monotonic() + 5
    while os.path.exists(f"/proc/{child}"):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def find_children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(each) for each in file.read().split()]
