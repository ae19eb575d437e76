"""Calls that run out of bounds end alone: what they are told, what is left, and what the next call notices."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
import pytest
from tandem_worker.host.isolation import keeper
from tandem_worker.host.isolation.confined import Confined
from tandem_worker.host.isolation.contract import (
    FunctionError,
    IsolationError,
    LimitError,
    Limits,
    QueueFullError,
    UnavailableError,
)

LIMITS = Limits(memory_bytes=256 << 20, stack_bytes=1 << 20, cpu_seconds=1.0, answer_bytes=64 << 20)
HERE = Path(__file__).parent
Start = Callable[..., Confined]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setenv("HF_TOKEN", "secret")
    started: list[Confined] = []

    def start(setup: str = "hostile:setup", payload: bytes = b"", **options: object) -> Confined:
        confined = Confined(setup, payload, **{"limits": LIMITS, "name": "test", **options})  # type: ignore[arg-type]
        started.append(confined)
        confined.start()
        return confined

    yield start
    for confined in started:
        confined.close()


def wait_for(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the latter where it ends between opening and reading
        return False
    return state != "Z"


def test_answers(start: Start) -> None:
    confined = start(payload=b"prepared, ")
    large = os.urandom(8 << 20)
    assert confined.call_here("echo", b"asked", seconds=30) == b"prepared, asked"
    assert confined.call_here("echo", large, seconds=30) == b"prepared, " + large


async def test_answers_on_an_event_loop_at_the_same_time(start: Start) -> None:
    confined = start(parallel=2, queue=6)
    answers = await asyncio.gather(*(confined.call("echo", b"%d" % i, seconds=30) for i in range(8)))
    assert answers == [b"%d" % i for i in range(8)]
    assert confined.counts.calls == 8


@pytest.mark.parametrize(
    ("function", "request_", "limit"),
    [
        ("sleep", b"", "deadline"),
        ("compute", b"", "cpu_seconds"),
        ("allocate", b"4000000000", "memory_bytes"),
        ("signal", b"%d" % signal.SIGSEGV, "stack_bytes"),
        ("signal", b"%d" % signal.SIGABRT, "memory_bytes"),
        ("signal", b"%d" % signal.SIGILL, "crash"),
        ("allocate", b"%d" % (65 << 20), "answer_bytes"),
    ],
)
def test_what_runs_out_of_bounds_is_told_so_and_the_next_call_is_served(
    start: Start, function: str, request_: bytes, limit: str
) -> None:
    confined = start()
    confined.call_here("echo", b"", seconds=30)
    process = confined.process_id
    began = time.monotonic()
    with pytest.raises(LimitError) as caught:
        confined.call_here(function, request_, seconds=3 if function == "sleep" else 50)
    assert caught.value.limit == limit
    assert time.monotonic() - began < 50, "it would sleep for a minute"
    assert confined.call_here("echo", b"next", seconds=30) == b"next"
    assert confined.process_id == process
    assert confined.num_restarts == 0


def test_a_job_ends_with_its_deadline(start: Start) -> None:
    confined = start()
    confined.call_here("echo", b"", seconds=30)
    children = Path(f"/proc/{confined.process_id}/task/{confined.process_id}/children")
    with pytest.raises(LimitError):
        confined.call_here("sleep", b"", seconds=2.0)
    wait_for(lambda: len(children.read_text().split()) == 2)  # those that wait for a call


def test_a_call_whose_jobs_are_killed_is_tried_again_once(start: Start) -> None:
    with pytest.raises(UnavailableError, match="died twice"):
        start().call_here("signal", b"%d" % signal.SIGKILL, seconds=30)


def test_a_job_that_died_while_it_waited_is_nobodys_fault(start: Start) -> None:
    confined = start()
    confined.call_here("echo", b"", seconds=30)
    children = Path(f"/proc/{confined.process_id}/task/{confined.process_id}/children")
    wait_for(lambda: len(children.read_text().split()) >= 2)
    jobs = [int(job) for job in children.read_text().split()]
    for job in jobs:
        with contextlib.suppress(ProcessLookupError):  # a third that nobody needs, made beside the stock, has left
            os.kill(job, signal.SIGKILL)
    wait_for(lambda: not any(map(is_alive, jobs)))
    assert confined.call_here("echo", b"next", seconds=30) == b"next"


def test_jobs_serve_many_calls_and_are_replaced_now_and_then(start: Start) -> None:
    confined = start()
    seen = [confined.call_here("who", b"", seconds=30) for _ in range(250)]
    assert 3 <= len(set(seen)) <= 10


def test_a_library_that_would_start_threads_does_not(start: Start) -> None:
    assert start("hostile:setup_with_numpy").call_here("sum", b"\1\2", seconds=30) == b"3"


def test_exceptions_are_reported(start: Start) -> None:
    confined = start()
    with pytest.raises(FunctionError, match="ZeroDivisionError"):
        confined.call_here("fail", b"", seconds=30)
    with pytest.raises(FunctionError, match="KeyError"):
        confined.call_here("unknown", b"", seconds=30)
    with pytest.raises(FunctionError, match="SystemExit"):
        confined.call_here("leave", b"", seconds=30)


def test_nothing_of_this_process_is_inherited(start: Start, tmp_path: Path) -> None:
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        seen = orjson.loads(start().call_here("look", b"", seconds=30))
    assert [link for link in seen["fds"] if link != "/dev/null" and not link.startswith("/proc/")] == [
        link for link in seen["fds"] if link.startswith("socket:")
    ]
    assert sum(link.startswith("socket:") for link in seen["fds"]) == 1
    assert "HF_TOKEN" not in seen["environment"]
    assert not {"torch", "transformers", "numpy"} & set(seen["modules"])


def test_a_call_survives_the_death_of_the_process_under_it(start: Start) -> None:
    confined = start()
    confined.call_here("echo", b"", seconds=30)
    process = confined.process_id
    assert process is not None
    timer = threading.Timer(0.3, os.kill, (process, signal.SIGKILL))
    timer.start()
    assert confined.call_here("nap", b"2.5", seconds=30) != b"%d" % process
    timer.join()
    assert confined.num_restarts == 1


def test_a_process_that_hangs_is_replaced(start: Start) -> None:
    confined = start()
    confined.call_here("echo", b"", seconds=30)
    process = confined.process_id
    assert process is not None
    children = Path(f"/proc/{process}/task/{process}/children")
    wait_for(lambda: len(children.read_text().split()) == 2)
    os.kill(process, signal.SIGSTOP)
    for job in children.read_text().split():  # they would go on serving
        os.kill(int(job), signal.SIGKILL)
    failures: list[str] = []
    for _ in range(8):
        try:
            confined.call_here("echo", b"", seconds=0.7)
        except (UnavailableError, LimitError) as error:  # the new one's jobs may be slow on a busy machine
            failures.append(str(error))
    assert any("did not begin" in failure for failure in failures)
    wait_for(lambda: confined.process_id not in {None, process})
    assert confined.call_here("echo", b"again", seconds=30) == b"again"
    assert not is_alive(process)


@pytest.mark.parametrize(
    ("setup", "words"),
    [
        ("hostile:setup_that_fails", "the vocabulary is torn"),
        ("hostile:setup_that_ends", "ended with 7"),
        ("hostile:setup_with_a_thread", "threads running"),
        ("no_such_module:setup", "no_such_module"),
    ],
)
def test_a_process_that_cannot_be_prepared_is_an_error_with_its_cause(start: Start, setup: str, words: str) -> None:
    with pytest.raises(UnavailableError, match=words):
        start(setup).call_here("echo", b"", seconds=30)


@pytest.mark.parametrize("setup", ["hostile:setup_that_fails", "hostile:setup_that_ends"])
def test_a_setup_that_fails_again_and_again_is_given_up(
    start: Start, setup: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keeper, "_FIRST_PAUSE_SECONDS", 0.01)
    confined = start(setup)
    wait_for(lambda: not confined._keeper._thread.is_alive())
    tried = [
        record for record in caplog.records if "cannot be started" in record.message and record.levelname == "ERROR"
    ]
    assert len(tried) == keeper.MOST_SETUPS
    with pytest.raises(UnavailableError, match="given up after 5 tries"):
        confined.call_here("echo", b"", seconds=30)
    assert confined.process_id is None


def test_a_process_that_others_kill_while_it_starts_is_never_given_up(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "_FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(keeper, "MOST_SETUPS", 1)
    confined = start("hostile:setup_that_is_killed_until", payload=b"%f" % (time.time() + 1.0))
    wait_for(lambda: confined.process_id is not None)
    assert confined.call_here("echo", b"", seconds=30) == b""


def test_a_process_that_cannot_be_started_is_tried_again(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    confined = start()
    with pytest.raises(UnavailableError, match="/no/such/python"):
        confined.call_here("echo", b"", seconds=30)
    monkeypatch.undo()
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    wait_for(lambda: confined.process_id)
    assert confined.call_here("echo", b"now", seconds=30) == b"now"


async def test_a_full_queue_refuses_at_once(start: Start) -> None:
    confined = start(parallel=1, queue=1)
    await confined.call("echo", b"", seconds=30)
    running = [asyncio.create_task(confined.call("nap", b"0.5", seconds=30)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError):
        await confined.call("echo", b"", seconds=30)
    await asyncio.gather(*running)
    assert await confined.call("echo", b"free", seconds=30) == b"free"


async def test_waiting_counts_to_the_deadline(start: Start) -> None:
    confined = start(parallel=1)
    await confined.call("echo", b"", seconds=30)
    first = asyncio.create_task(confined.call("nap", b"2.5", seconds=30))
    await asyncio.sleep(0.1)
    with pytest.raises(UnavailableError, match="in time"):
        await confined.call("echo", b"", seconds=0.3)
    await first


async def test_a_call_that_is_given_up_ends_its_job_and_makes_room(start: Start) -> None:
    confined = start(parallel=1, queue=1)
    job = int(await confined.call("who", b"", seconds=30))
    running = asyncio.create_task(confined.call("sleep", b"", seconds=50))
    queued = asyncio.create_task(confined.call("sleep", b"", seconds=50))
    await asyncio.sleep(0.2)
    for given_up in (queued, running):  # the one that waits never begins
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
    assert int(await confined.call("who", b"", seconds=45)) != job, "those who gave up had 50 seconds"
    await asyncio.to_thread(wait_for, lambda: not is_alive(job))
    assert (confined.num_restarts, confined.counts.unavailable, confined.counts.limited) == (0, 0, 0)


def test_it_ends_with_its_parent() -> None:
    program = (
        "import sys; from tandem_worker.host.isolation.confined import Confined\n"
        "from tandem_worker.host.isolation.contract import Limits\n"
        "c = Confined('hostile:setup', b'', name='test', limits=Limits(memory_bytes=1 << 28, stack_bytes=1 << 20,"
        " cpu_seconds=60, answer_bytes=1 << 20))\n"
        "c.start(); c.call_here('echo', b'', seconds=30); print(c.process_id, flush=True); sys.stdin.read(1)\n"
        "c.call_here('sleep', b'', seconds=60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(HERE)},
    )
    assert parent.stdout is not None
    assert parent.stdin is not None
    with parent.stdout, parent.stdin:
        process = int(parent.stdout.readline())
        children = Path(f"/proc/{process}/task/{process}/children")
        parent.stdin.write(b"x")
        parent.stdin.flush()
        wait_for(lambda: len(children.read_text().split()) >= 2)
        jobs = [int(job) for job in children.read_text().split()]
        parent.kill()
        parent.wait()
    wait_for(lambda: not any(map(is_alive, [process, *jobs])))


def test_after_closing_calls_are_refused(start: Start) -> None:
    confined = start()
    confined.call_here("echo", b"", seconds=30)
    process = confined.process_id
    assert process is not None
    confined.close()
    wait_for(lambda: not is_alive(process), 60)
    with pytest.raises(IsolationError, match="closed"):
        confined.call_here("echo", b"", seconds=30)
