from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_worker.process.graph import Step, check_steps, run_steps
from tandem_worker.process.progress import StartFigure, StartProgress


def step(name: str, *needs: str, run: Callable[..., Any] = lambda *_: None) -> Step:
    return Step(name=name, what=f"doing {name}", run=run, needs=needs)


class Observer:
    """Notes what it is told, in order."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        self.waited_for: dict[str, str | None] = {}

    def begin(self, step: Step, waited_for: str | None) -> None:
        self.told.append(("begin", step.name))
        self.waited_for[step.name] = waited_for

    def end(self, step: Step, cpu_seconds: float) -> None:
        assert cpu_seconds >= 0
        self.told.append(("end", step.name))


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([step("a"), step("a")], "two steps are called a"),
        ([step("a", "b")], "a needs b, which no step is called"),
        ([step("a", "a")], "circle: a"),
        ([step("a", "b"), step("b", "a"), step("c")], "circle: a, b"),
    ],
)
def test_what_is_no_graph_is_refused(steps: list[Step], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_steps(steps)
    with pytest.raises(ValueError, match=words):
        run_steps(steps, Observer())


def test_steps_get_what_they_need_in_their_order() -> None:
    steps = [
        step("sum", "left", "right", run=lambda left, right: f"{left}-{right}"),
        step("right", run=lambda: 2),
        step("left", run=lambda: 1),
    ]
    assert run_steps(steps, Observer()) == {"left": 1, "right": 2, "sum": "1-2"}


def test_what_does_not_wait_for_each_other_runs_at_once() -> None:
    together = threading.Barrier(3, timeout=20)
    steps = [step(name, run=together.wait) for name in "abc"]
    assert sorted(run_steps(steps, Observer()).values()) == [0, 1, 2]


@given(st.data())
def test_any_graph_is_run_whole_and_in_order(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 9))
    steps = [
        step(str(number), *map(str, data.draw(st.sets(st.integers(0, number - 1))) if number else ()))
        for number in range(count)
    ]
    observer = Observer()
    results = run_steps(data.draw(st.permutations(steps)), observer)
    assert results.keys() == {one.name for one in steps}
    at = {entry: index for index, entry in enumerate(observer.told)}
    for one in steps:
        assert at["begin", one.name] < at["end", one.name]
        assert all(at["end", name] < at["begin", one.name] for name in one.needs)
        last = max(one.needs, key=lambda name: at["end", name], default=None)
        assert observer.waited_for[one.name] == last


@pytest.mark.parametrize("error", [ValueError("no such file"), SystemExit(3), KeyboardInterrupt()])
def test_the_first_failure_is_raised_at_once(error: BaseException) -> None:
    def fail() -> None:
        raise error

    released = threading.Event()
    steps = [step("slow", run=lambda: released.wait(60)), step("fails", run=fail), step("after", "fails", "slow")]
    observer = Observer()
    with pytest.raises(type(error)) as raised:
        run_steps(steps, observer)
    assert raised.value is error
    assert not released.is_set()
    assert ("end", "fails") in observer.told
    assert ("begin", "after") not in observer.told
    released.set()


def test_threads_end_with_their_steps() -> None:
    found: list[threading.Thread] = []
    steps = [step(name, run=lambda: found.append(threading.current_thread())) for name in "abc"]
    run_steps(steps, Observer())
    for thread in found:
        thread.join(60)
        assert not thread.is_alive()
        assert thread is not threading.current_thread()


def test_progress_tells_what_runs_and_what_it_took() -> None:
    now = [100.0]
    progress = StartProgress(lambda: now[0], age=1.5)
    fetch, load = step("fetch"), step("load", "fetch")
    assert progress.phase == "starting"
    assert progress.figure() is None
    assert progress.seconds() == {"process": 1.5, "total": 0.0}
    progress.begin(fetch, None)
    progress.begin(step("beside"), None)
    assert progress.phase == "doing fetch, doing beside"
    now[0] += 2
    progress.end(fetch, 0.25)
    assert progress.phase == "doing beside"
    progress.begin(load, "fetch")
    assert progress.phase == "doing beside, doing load"
    now[0] += 3
    for one in (load, step("beside")):
        progress.end(one, 0.5)
    progress.be_ready()
    assert progress.phase == "ready"
    assert progress.figure() == StartFigure(seconds=6.5, origin="files")
    assert progress.seconds() == {"process": 1.5, "fetch": 2.0, "beside": 5.0, "load": 3.0, "total": 6.5}
    told = progress.describe()
    assert told["load"] == {"began": 3.5, "ended": 6.5, "cpu": 0.5, "waited_for": "fetch"}
    assert told["fetch"]["waited_for"] is None


def test_a_step_that_computes_is_told_its_own_processor_time() -> None:
    def compute() -> None:
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass

    spent: dict[str, float] = {}

    class Meter(Observer):
        def end(self, step: Step, cpu_seconds: float) -> None:
            spent[step.name] = cpu_seconds

    run_steps([step("computes", run=compute), step("waits", run=lambda: time.sleep(0.05))], Meter())
    assert spent["computes"] >= 0.05 > spent["waits"]
