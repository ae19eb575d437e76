"""`pytest --forks N`: modules are imported and tests collected once, and N processes that are forked then share them.

pytest-xdist's processes import everything each: of four, every one took 15 seconds of a core before its first test.

A process takes one file after another, in the order of the collection, so that fixtures of a module are built once; it
asks for the next file before the last test of the one at hand, and says what its tests report. This process, which ran
no test itself, reports that as if it had. A process that ends in a test fails this test, and another one, forked from
here, takes what it has left. A run in which a test was not heard to its end fails, whatever the others say.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import pytest
from _pytest.config import create_terminal_writer  # public names do not reach what a forked process has to replace
from _pytest.reports import TestReport
from pytest_timeout import _get_item_settings

from tests import leftovers

ENDING_SECONDS = 30.0
LOOK_SECONDS = 1.0
ALONE = {"usepdb": "--pdb", "trace": "--trace", "stepwise": "--stepwise", "numprocesses": "-n"}
"""Options that one process can follow, or pytest-xdist's."""
_PR_SET_PDEATHSIG = 1
_forked = threading.Event()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=0, metavar="N", help="share the tests among N forked processes")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """In this process and, when that returns from `share`, in each that was forked."""
    count = session.config.getoption("forks")
    if not count or session.config.option.collectonly or session.testsfailed:
        return None
    for name, option in ALONE.items():
        if session.config.getoption(name, None):
            raise pytest.UsageError(f"--forks and {option} exclude each other: leave one of them out")
    if count < 0:
        raise pytest.UsageError(f"--forks {count}: write how many processes share the tests")
    if threading.active_count() > 1 or len(os.listdir("/proc/self/task")) > 1:
        names = ", ".join(thread.name for thread in threading.enumerate())
        raise pytest.UsageError(f"a fork would lose threads that a test module started when it was imported: {names}")
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    assert terminal is not None
    terminal.showfspath = False
    link = Sharing(session).share(count)
    if link is not None:
        _work(session, link)
    return True


def is_forked() -> bool:
    """Whether this process was forked to take a share of the tests."""
    return _forked.is_set()


class _Process:
    """One that was forked, as seen from here."""

    def __init__(self, number: int, pid: int, link: Connection) -> None:
        self.number, self.pid, self.link = number, pid, link
        self.left: deque[int] = deque()
        """Tests that it has been given and not finished, by their place in the collection."""
        self.running = False
        """The first of them has begun."""
        self.began_any = False
        self.ended = False
        """It said that it would."""
        self.status: int | None = None
        self.heard = time.monotonic()
        """When it last said something."""
        self.silence = 0.0
        """Seconds after which it hangs: where a test's own timeout could not end it. 0 is none."""
        self.hung = ""
        """What is to be said of that."""

    def has_ended(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status is not None


class Sharing:
    """Which process has which tests."""

    def __init__(self, session: pytest.Session) -> None:
        self._session, self._hook = session, session.config.hook
        files: dict[str, list[int]] = {}
        for index, item in enumerate(session.items):
            files.setdefault(item.nodeid.partition("::")[0], []).append(index)
        self._files = deque(files.values())
        self._unheard = set(range(len(session.items)))
        """Tests that no process has finished, nor ended in."""
        self._looked = time.monotonic()
        self._processes: dict[Connection, _Process] = {}

    def share(self, count: int) -> Connection | None:
        """Returns when all have ended; in a forked process at once, with its way to talk to the first one."""
        try:
            for number in range(min(count, len(self._files))):
                if (link := self._fork(number)) is not None:
                    return link
            while self._processes:
                if (link := self._listen()) is not None:
                    return link
        finally:
            self._interrupt()
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)
        if self._unheard:
            names = [self._session.items[index].nodeid for index in sorted(self._unheard)]
            raise RuntimeError(f"{len(names)} of {len(self._session.items)} tests did not end: {', '.join(names[:5])}")
        return None

    def _listen(self) -> Connection | None:
        """Hear what they say. As `share`, where another one is forked for one that has ended.

        What a test has forked may hold the other end of a link: that a process has ended is looked for, too."""
        said = [self._processes[link] for link in wait(list(self._processes), LOOK_SECONDS)]  # type: ignore[index]
        hung_up = [process for process in said if not self._hear_next(process)]
        if not hung_up and time.monotonic() - self._looked < LOOK_SECONDS:
            return None
        self._looked = time.monotonic()
        for process in list(self._processes.values()):
            if process.has_ended():
                while process.link.poll() and self._hear_next(process):
                    pass
                if (link := self._bury(process)) is not None:
                    return link
            elif process.silence and time.monotonic() - process.heard > process.silence:
                process.heard, process.hung = time.monotonic(), f" after {process.silence:.0f} silent seconds"
                os.kill(process.pid, signal.SIGABRT)  # with which Python tells where it hangs
            elif process in hung_up:
                time.sleep(0.01)  # it is about to end
        return None

    def _hear_next(self, process: _Process) -> bool:
        """Whether there was anything left to hear."""
        try:
            told = process.link.recv()
        except (EOFError, OSError):  # the latter where it ended within a word
            return False
        process.heard = time.monotonic()
        self._hear(process, *told)
        return True

    def _interrupt(self) -> None:
        """End those that still run, where this process fails: their tests may end what they have started."""
        running = [process for process in self._processes.values() if not process.has_ended()]
        for process in running:
            os.kill(process.pid, signal.SIGINT)
        deadline = time.monotonic() + ENDING_SECONDS
        for process in running:
            process.link.close()
            while not process.has_ended():
                if time.monotonic() > deadline:
                    os.kill(process.pid, signal.SIGKILL)
                time.sleep(0.05)

    def _fork(self, number: int) -> Connection | None:
        ours, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        if pid := os.fork():
            theirs.close()
            self._processes[ours] = _Process(number, pid, ours)
            return None
        for process in self._processes.values():
            process.link.close()
        self._processes.clear()
        ours.close()
        _end_with(parent)
        _forked.set()
        os.environ["PYTEST_XDIST_WORKER"] = f"gw{number}"  # by which tests of several processes keep apart
        return theirs

    def _hear(self, process: _Process, kind: str, *told: Any) -> None:
        if kind == "next":
            indices = self._files.popleft() if self._files and not self._session.shouldfail else []
            process.left.extend(indices)
            with contextlib.suppress(OSError):  # it has ended since
                process.link.send(indices)
        elif kind == "start":
            item = self._session.items[process.left[0]]
            if item.nodeid != told[0]:
                raise RuntimeError(f"process {process.number} was given {item.nodeid} and runs {told[0]}")
            process.running = process.began_any = True
            process.silence = 2 * _timeout(item)
            self._hook.pytest_runtest_logstart(nodeid=told[0], location=told[1])
        elif kind == "report":
            report = self._hook.pytest_report_from_serializable(config=self._session.config, data=told[0])
            self._hook.pytest_runtest_logreport(report=report)
            if report.when == "teardown":
                self._unheard.discard(process.left[0])
        elif kind == "finish":
            process.left.popleft()
            process.running = False
            self._hook.pytest_runtest_logfinish(nodeid=told[0], location=told[1])
        elif kind == "error":
            raise RuntimeError(f"in process {process.number}:\n{told[0]}")
        elif kind == "warning":
            text, filename, line, when, nodeid, location = told
            message = warnings.WarningMessage(UserWarning(text), UserWarning, filename, line)
            self._hook.pytest_warning_recorded.call_historic(
                kwargs={"warning_message": message, "when": when, "nodeid": nodeid, "location": location}
            )
        else:
            assert kind == "end"
            process.ended = not process.left or bool(self._session.shouldfail)
            leftovers.found.extend(told[0])

    def _bury(self, process: _Process) -> Connection | None:
        """It has ended. As `share`, where another one is forked for what it has left."""
        del self._processes[process.link]
        process.link.close()
        if process.ended:
            return None
        if not process.began_any:  # as would any other
            raise RuntimeError(f"process {process.number} ended with status {process.status} before its first test")
        items = self._session.items
        item = items[process.left[0]] if process.left else items[-1]
        what = "in this test" if process.running else "beside its tests"
        sentence = f"process {process.number} ended with status {process.status} {what}{process.hung}"
        report = TestReport(item.nodeid, item.location, {}, "failed", sentence, "call")
        self._hook.pytest_runtest_logreport(report=report)
        if process.running:
            self._unheard.discard(process.left.popleft())
        if process.left:
            self._files.appendleft(list(process.left))
        return self._fork(process.number) if self._files and not self._session.shouldfail else None


def _timeout(item: pytest.Item) -> float:
    """Seconds after which pytest-timeout ends a test; 0 without."""
    return (_get_item_settings(item).timeout or 0.0) if item.config.pluginmanager.has_plugin("timeout") else 0.0


def _end_with(parent: int) -> None:
    """In a forked process: it is interrupted when the first one ends, however that does, and never twice, because
    fixtures end what they have started meanwhile: Ctrl-C reaches both, and the first one sends what it gets."""
    signal.signal(signal.SIGINT, _interrupt_once)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGINT)


def _interrupt_once(*_: object) -> None:
    signal.signal(signal.SIGINT, lambda *_: None)
    raise KeyboardInterrupt


def _work(session: pytest.Session, link: Connection) -> None:
    """In a forked process: run what is given until nothing is."""
    config = session.config
    leftovers.forget()
    _keep_outputs_apart(config)
    config.workeroutput = {}  # type: ignore[attr-defined]
    telling = _Telling(config, link)
    config.pluginmanager.register(telling)
    telling.begun = True

    def ask() -> list[int]:
        link.send(("next",))
        return link.recv()

    indices, items = ask(), session.items
    while indices:
        following: list[int] = []
        for place, index in enumerate(indices, 1):
            if place == len(indices):
                following = ask()
            upcoming = next((items[after] for after in indices[place:] or following), None)
            config.hook.pytest_runtest_protocol(item=items[index], nextitem=upcoming)
            if session.shouldfail or session.shouldstop:
                return
        indices = following


def _keep_outputs_apart(config: pytest.Config) -> None:
    """Captured output and folders are this process's own, and the terminal is not."""
    terminal, capture = map(config.pluginmanager.get_plugin, ("terminalreporter", "capturemanager"))
    terminal._tw = create_terminal_writer(config, open(os.devnull, "w"))  # noqa: SIM115  until the end
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    factory = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = factory.getbasetemp() / f"{os.environ['PYTEST_XDIST_WORKER']}-{os.getpid()}"
    factory._basetemp.mkdir(mode=0o700)


class _Telling:
    """What hooks of a forked process hear, the first one is told."""

    def __init__(self, config: pytest.Config, link: Connection) -> None:
        self._config, self._link = config, link
        self.begun = False
        """Warnings that came before are told to whoever registers."""

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self._link.send(("start", nodeid, location))

    def pytest_runtest_logreport(self, report: TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._link.send(("report", data))

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self._link.send(("finish", nodeid, location))

    def pytest_warning_recorded(self, warning_message: Any, when: str, nodeid: str, location: Any) -> None:
        if not self.begun:
            return
        text = f"{warning_message.category.__name__}: {warning_message.message}"
        self._link.send(("warning", text, warning_message.filename, warning_message.lineno, when, nodeid, location))

    def pytest_internalerror(self, excrepr: object) -> None:
        self._link.send(("error", str(excrepr)))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self) -> Iterator[None]:
        """Nothing of this process is needed any more: what the first one registered for its end is not run twice."""
        yield
        with contextlib.suppress(OSError):  # whoever does not hear it, knows that this one did not end well
            self._link.send(("end", self._config.workeroutput["leftovers"]))  # type: ignore[attr-defined]
        os._exit(0)
