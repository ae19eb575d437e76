"""A start as a graph: steps and what each needs, run at once where nothing is waited for.

Every step has a thread of its own, which ends with it. That matters for those that compute: libgomp counts the helpers
of every thread that ever did, and as soon as it counts more threads than cores, none of them waits for work without
going to sleep.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One part of a start."""

    name: str
    """What it is called in metrics, and by steps that need it."""
    what: str
    """What the worker is doing meanwhile, to go on from "it is still": `loading weights`."""
    run: Callable[..., Any]
    """Called with the results of what it needs, in that order. What it raises ends the start."""
    needs: tuple[str, ...] = ()


class StepObserver(Protocol):
    """Is told of steps, on the thread that runs the graph."""

    def begin(self, step: Step, waited_for: str | None) -> None:
        """`waited_for`: of what it needs, the step that ended last; None where it needs nothing."""
        ...

    def end(self, step: Step, cpu_seconds: float) -> None:
        """Processor time of the step's own thread; that of threads it started is not seen."""
        ...


@dataclass(frozen=True, slots=True)
class _End:
    step: Step
    result: Any
    error: BaseException | None
    cpu_seconds: float


def check_steps(steps: Iterable[Step]) -> None:
    """Raises ValueError where two have one name, one needs what is not there, or some need each other in a circle."""
    left = {}
    for step in steps:
        if step.name in left:
            raise ValueError(f"two steps are called {step.name}")
        left[step.name] = step
    known = frozenset(left)
    for step in left.values():
        if missing := [name for name in step.needs if name not in known]:
            raise ValueError(f"{step.name} needs {', '.join(missing)}, which no step is called")
    while left:
        free = [name for name, step in left.items() if left.keys().isdisjoint(step.needs)]
        if not free:
            raise ValueError(f"these steps need each other in a circle: {', '.join(left)}")
        for name in free:
            del left[name]


def run_steps(steps: Sequence[Step], observer: StepObserver) -> dict[str, Any]:
    """Run all steps, each as soon as what it needs is there. Returns the results by the steps' names.

    Raises what the first step that failed raised, at once: those that still run go on, on daemon threads, and whoever
    calls this is expected to end the process. Raises ValueError for steps that `check_steps` refuses.
    """
    check_steps(steps)
    ends: queue.SimpleQueue[_End] = queue.SimpleQueue()
    results: dict[str, Any] = {}
    waiting, last = list(steps), None
    while len(results) < len(steps):
        for step in _take_ready(waiting, results):
            observer.begin(step, last if step.needs else None)
            given = [results[name] for name in step.needs]
            threading.Thread(target=_run, args=(step, given, ends), name=f"start-{step.name}", daemon=True).start()
        end = ends.get()
        observer.end(end.step, end.cpu_seconds)
        if end.error is not None:
            raise end.error
        last = end.step.name
        results[last] = end.result
    return results


def _take_ready(waiting: list[Step], done: Collection[str]) -> list[Step]:
    """Remove from `waiting`, and return, the steps that need nothing more."""
    ready = [step for step in waiting if all(name in done for name in step.needs)]
    for step in ready:
        waiting.remove(step)
    return ready


def _run(step: Step, given: Sequence[Any], ends: queue.SimpleQueue[_End]) -> None:
    began = time.thread_time()
    result, error = None, None
    try:
        result = step.run(*given)
    except BaseException as raised:
        error = raised
    ends.put(_End(step, result, error, time.thread_time() - began))
