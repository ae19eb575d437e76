"""Steps that do not end: judged by numbers, then in real worker processes whose engine hangs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_worker.process.watchdog import DEFAULT_SECONDS, LEARNED_FACTOR, LEARNED_MAX_SECONDS, TurnAge

TICK = 0.25
HANGS = """
import contextlib, pathlib, sys, threading, importlib.abc, importlib.machinery

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "tandem_worker.engine.execute.executor":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        run_module = spec.loader.exec_module

        def exec_module(module):
            run_module(module)
            run = module.ModelExecutor.run

            def hang_or_compute(self, plan, on_layer):
                with contextlib.suppress(FileNotFoundError):
                    while not (seconds := pathlib.Path(HANG).read_text()):
                        threading.Event().wait(1.0)
                    threading.Event().wait(float(seconds))
                return run(self, plan, on_layer)

            module.ModelExecutor.run = hang_or_compute

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""
"""In the worker's process, as `sitecustomize`: its device hangs while the file HANG is there, each step as long as it
says, or where it is empty until it has gone."""


def age_after(looks: list[tuple[float, float, float]]) -> TurnAge:
    """After looks of (turn, now, waited)."""
    age = TurnAge(tick_seconds=TICK)
    for began, now, waited in looks:
        age.look(began, now=now, waited=waited)
    return age


def test_a_turn_ages_by_the_ticks_it_outlasts() -> None:
    age = age_after([(7.0, TICK * tick, 0.0) for tick in range(41)])
    assert age.seconds == pytest.approx(10.0)
    assert age_after([(7.0, 0.0, 0.0), (7.0, TICK, 0.0), (8.0, 2 * TICK, 0.0)]).seconds == 0.0


def test_a_sleeping_engine_does_not_age() -> None:
    assert age_after([(0.0, TICK * tick, 0.0) for tick in range(400)]).seconds == 0.0


def test_a_paused_process_has_not_aged() -> None:
    """The clock has run on by an hour; this thread saw one tick of it."""
    assert age_after([(7.0, 0.0, 0.0), (7.0, TICK, 0.0), (7.0, 3600.0, 0.0)]).seconds <= 3 * TICK


def test_time_without_a_core_is_no_time() -> None:
    looks = [(7.0, TICK * tick, TICK * tick * 0.9) for tick in range(401)]
    assert age_after(looks).seconds == pytest.approx(10.0)


@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0, 2.0]), st.floats(0, 100), st.floats(0, 100)), max_size=50))
def test_no_turn_is_older_than_the_ticks_allow(steps: list[tuple[float, float, float]]) -> None:
    now = waited = 0.0
    age = TurnAge(tick_seconds=TICK)
    for count, (began, passed, lost) in enumerate(steps):
        now, waited = now + passed, waited + lost
        assert 0.0 <= age.look(began, now=now, waited=waited) <= min(now, 2 * TICK * count)


def test_the_bound_learns_from_slow_steps_and_no_further() -> None:
    age = TurnAge(tick_seconds=TICK)
    assert age.bound(None) == DEFAULT_SECONDS
    assert age.bound(4.0) == 4.0
    assert age.bound(0) is None
    for tick in range(int(20 / TICK) + 1):
        age.look(1.0, now=tick * TICK, waited=0.0)
    age.look(2.0, now=21.0, waited=0.0)
    assert age.bound(None) == pytest.approx(LEARNED_FACTOR * 20)
    age.longest = 1e9
    assert age.bound(None) == LEARNED_MAX_SECONDS
    assert age.bound(900.0) == 900.0


def hanging(folder: Path) -> tuple[Path, dict[str, str]]:
    """The file whose presence makes a worker's steps hang, and the environment in which it does."""
    switch = folder / "hang"
    (folder / "sitecustomize.py").write_text(HANGS.replace("HANG", repr(str(switch))))
    return switch, {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def hang_for(switch: Path, seconds: str) -> None:
    """Each step, from now on. No step finds the file empty."""
    switch.with_suffix(".new").write_text(seconds)
    switch.with_suffix(".new").rename(switch)


def ask(worker: Any, answers: list[httpx.Response]) -> threading.Thread:
    def post() -> None:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 7000, "ignore_eos": True}
        with contextlib.suppress(httpx.TransportError):  # some tests kill the worker
            answers.append(httpx.post(worker.url + "/v1/completions", json=body, timeout=90))

    thread = threading.Thread(target=post)
    thread.start()
    workers_busy = time.monotonic() + 60
    while worker.metric("tandem_worker_kv_blocks_used") == 0:
        assert time.monotonic() < workers_busy
        time.sleep(0.01)
    return thread


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def unready(worker: Any) -> str:
    response = worker.get("/readyz")
    return response.text if response.status_code == 503 else ""


def test_a_hung_step_makes_the_worker_unready_then_restarts_it(
    workers: SimpleNamespace, tiny_model: Path, tmp_path: Path
) -> None:
    switch, environment = hanging(tmp_path)
    run = workers.run(tmp_path, "unified", tiny_model, environment=environment, stepTimeoutSeconds=2)
    with run as worker:
        workers.await_ready(worker)
        answers: list[httpx.Response] = []
        running = ask(worker, answers)
        switch.touch()
        workers.eventually(lambda: "a step of the engine has not ended" in unready(worker), 60, "it is unready")
        assert worker.get("/healthz").status_code == 200, "a restart by liveness would leave no word"
        assert worker.process.wait(60) == 1
        running.join(60)
    told = json.loads(worker.log.with_suffix(".termination").read_text())
    assert told["reason"] == "StepHung"
    assert "1 decodes and 0 prompt tokens" in told["message"]
    assert "rank 0 of 1" in told["message"]
    assert "wait (threading.py" in told["message"]
    assert worker.logged("hang_or_compute"), "the stack of the engine's thread is in the log"
    assert "a step of the engine has not ended" in answers[0].text


def test_a_slow_step_recovers_and_is_learned_and_a_stopped_process_is_left_alone(
    workers: SimpleNamespace, tiny_model: Path, tmp_path: Path
) -> None:
    switch, environment = hanging(tmp_path)
    run = workers.run(tmp_path, "unified", tiny_model, environment=environment, stepTimeoutSeconds=3)
    with run as worker:
        workers.await_ready(worker)
        running = ask(worker, [])
        switch.touch()  # until it was seen, and for less than the 6 s after which it would end
        workers.eventually(lambda: "has not ended" in unready(worker), 60, "it is unready")
        switch.unlink()
        workers.eventually(lambda: worker.get("/readyz").status_code == 200, 60, "it is ready again")
        # The process stands still for longer than a step may take: on no step's account.
        os.kill(worker.process.pid, signal.SIGSTOP)
        time.sleep(6)
        os.kill(worker.process.pid, signal.SIGCONT)
        hang_for(switch, "3.5")  # no longer than the longest before: allowed by now
        time.sleep(1)
        switch.unlink()
        for _ in range(20):
            assert worker.get("/readyz").status_code == 200
            time.sleep(0.25)
        assert worker.process.poll() is None
        worker.process.kill()
        running.join(60)


@pytest.mark.full
def test_the_leader_covers_a_member_that_hangs(workers: SimpleNamespace, tiny_model: Path, tmp_path: Path) -> None:
    group = {"group": {"parallelism": {"tensor": 2}}}
    with workers.run(tmp_path, "unified", tiny_model, stepTimeoutSeconds=2, **group) as worker:
        workers.await_ready(worker)
        tasks = Path(f"/proc/{worker.process.pid}/task").iterdir()
        children = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
        (member,) = [pid for pid in children if b"--follow" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        answers: list[httpx.Response] = []
        running = ask(worker, answers)
        os.kill(member, signal.SIGSTOP)
        assert worker.process.wait(60) == 1
        running.join(60)
    told = json.loads(worker.log.with_suffix(".termination").read_text())
    assert told["reason"] == "StepHung"
    assert "rank 0 of 2" in told["message"]
    assert answers[0].status_code >= 500
    workers.eventually(lambda: not alive(member), 60, "it does not outlive its leader")


def test_a_step_timeout_of_zero_lets_steps_hang(workers: SimpleNamespace, tiny_model: Path, tmp_path: Path) -> None:
    switch, environment = hanging(tmp_path)
    run = workers.run(tmp_path, "unified", tiny_model, environment=environment, stepTimeoutSeconds=0)
    with run as worker:
        workers.await_ready(worker)
        running = ask(worker, [])
        hang_for(switch, "4")
        time.sleep(5)
        assert worker.get("/readyz").status_code == 200
        worker.process.kill()
        running.join(60)
