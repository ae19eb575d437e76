"""How the whole of the tests runs: what is collected stays out of the collector's sight, and long files begin early."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import leftovers
from tests.forks import is_forked, pytest_addoption, pytest_runtestloop
from tests.full import reason_of
from tests.mooncake.fixtures import loopback_alone, module_on_loopback_alone
from tests.tandem_worker.process.forking import Forker, SharedForker

__all__ = ("loopback_alone", "module_on_loopback_alone", "pytest_addoption", "pytest_runtestloop")
"""Fixtures and hooks of others' files."""

# How long an example takes says how busy the machine is.
settings.register_profile("tandem", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("gate", settings.get_profile("tandem"), derandomize=True, max_examples=30)
"""The same examples in every run: a change is not refused for what chance finds elsewhere. The full run draws anew."""

_shared: list[SharedForker] = []
"""One, where several processes share the tests."""

LONG = (
    "tests/tandem_worker/process/",
    "tests/tandem_worker/kernels/test_interpreter.py",
    "tests/tandem_worker/kernels/test_compiles_for_hopper.py",
    "tests/tandem_gateway/test_unbroken.py",
    "tests/tandem_worker/server/test_real_model.py",
    "tests/tandem_worker/server/test_resume.py",
    "tests/tandem_worker/group/",
    "tests/tandem_worker/parallel/",
    "tests/tandem_worker/host/test_environment.py",
    "tests/tandem_worker/tiers/mooncake/test_faults.py",
    "tests/tandem_worker/model/sources/test_swarm_processes.py",
    "tests/tandem_operator/rollout/test_rollout_plan.py",
    "tests/tandem_operator/autoscale/test_scaler.py",
    "tests/tandem_operator/test_sleeping.py",
    "tests/tandem_gateway/engines/",
    "tests/tandem_gateway/test_unbroken_responses.py",
    "tests/tandem_gateway/test_responses.py",
    "tests/tandem_gateway/test_delivery.py",
    "tests/tandem_worker/kernels/test_benchmark.py",
)
"""Files that take more than ten seconds on an idle machine. None of them may be the last to begin."""


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Modules and tests are millions of objects, and torch and transformers are most of them. They stay until the end,
    and a collector that looks at them again and again, during imports and in every test, finds nothing to free.

    Of a whole run it is known that workers will be forked: another core imports what from, meanwhile."""
    if _is_shared(session) and any(Path(each).resolve() == Path(__file__).parent for each in session.config.args):
        _shared.append(SharedForker())
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def forker() -> Iterator[Forker]:
    """Where worker processes are forked from that are started for their behaviour, and not for their start."""
    forker = Forker(_shared[0].address if _shared else None)
    yield forker
    forker.close()


def pytest_collection_finish(session: pytest.Session) -> None:
    """What processes that are forked here will fork workers from, is imported once for all of them."""
    is_asked_for = any("forker" in getattr(item, "fixturenames", ()) for item in session.items)
    if _is_shared(session) and is_asked_for and not _shared:
        _shared.append(SharedForker())
    while _shared and not is_asked_for:
        _shared.pop().close()


def _is_shared(session: pytest.Session) -> bool:
    return bool(session.config.getoption("forks")) and not session.config.option.collectonly


def pytest_configure(config: pytest.Config) -> None:
    """Note what this process makes in the temporary folder, and settle how hypothesis draws before modules are read."""
    leftovers.watch_temporary_files()
    settings.load_profile("gate" if "not full" in config.getoption("markexpr") else "tandem")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """What is frozen at the end of a process is never freed, and libraries in C take that for leaks and say so.

    A process that ran tests and leaves something behind fails the run; of several, each tells the first one."""
    if not is_forked():  # those do not end as processes do
        gc.unfreeze()
        for each in _shared:
            each.close()
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["leftovers"] = leftovers.find_leftovers()
    elif not session.config.getoption("numprocesses", None):
        leftovers.found.extend(leftovers.find_leftovers())
    if leftovers.found and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """What one of several processes left behind."""
    leftovers.found.extend(getattr(node, "workeroutput", {}).get("leftovers", []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was left behind."""
    for each in leftovers.found:
        terminalreporter.write_line(f"LEFT BEHIND: {each}", red=True)


@pytest.hookimpl(tryfirst=True)  # before markers choose
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what the gate leaves to the full run. Where several processes share the tests they take files in this order:
    long ones first, but others in between, because long ones wait for timers and start processes, which side by side
    would wait for each other."""
    for item in items:
        if reason_of(item.nodeid) is not None:
            item.add_marker(pytest.mark.full)
    if "PYTEST_XDIST_WORKER" in os.environ or config.getoption("forks"):
        files: dict[str, list[pytest.Item]] = {}
        for item in items:
            files.setdefault(item.nodeid.partition("::")[0], []).append(item)
        items[:] = [item for file in _spread(list(files)) for item in files[file]]


def _spread(files: list[str]) -> list[str]:
    """Long files evenly over the first half of the others."""
    long = [file for file in files if file.startswith(LONG)]
    others = [file for file in files if not file.startswith(LONG)]
    step = max(1, len(others) // (2 * max(1, len(long))))
    order: list[str] = []
    for index, file in enumerate(long):
        order += [file, *others[index * step : (index + 1) * step]]
    return order + others[len(long) * step :]
