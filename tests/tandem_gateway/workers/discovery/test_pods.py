"""The workers follow an API server that lists, watches, forgets, falls silent and dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from discovery_pods import make_pod
from discovery_server import FakeApiServer
from tandem_api.names import LABEL_MODEL
from tandem_gateway.errors import ConfigError
from tandem_gateway.scheduling import Worker
from tandem_gateway.workers.discovery import pods as module
from tandem_gateway.workers.discovery.kube import ApiServer
from tandem_gateway.workers.discovery.pods import PodWatcher
from tandem_gateway.workers.waker import Sleeper


class Watch:
    """A watcher under test and what it reported last."""

    def __init__(self, api: FakeApiServer, token: Path, silence_seconds: float = 300.0) -> None:
        """What the server sends over a watch that was given up in the meantime is lost, as with no real one."""
        self.reports: list[list[str]] = []
        self.token = token
        server = ApiServer(host="127.0.0.1", port=api.port, ca=None, token=token)
        self.sleepers: list[Sleeper] = []
        self.watcher = PodWatcher(
            server,
            namespace="ns",
            model="toy",
            apply=self._apply,
            tell_sleepers=self._tell,
            silence_seconds=silence_seconds,
            backoff_first=0.02,
        )
        self.task = asyncio.create_task(self.watcher.run())

    def _tell(self, sleepers: list[Sleeper]) -> None:
        self.sleepers = sleepers

    def _apply(self, workers: list[Worker]) -> None:
        self.reports.append(sorted(f"{worker.name}@{worker.address}" for worker in workers))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                assert not self.task.done(), self.task
                await asyncio.sleep(0.01)

    async def until_names(self, *names: str) -> None:
        await self.until(
            lambda: bool(self.reports) and [item.split("@")[0] for item in self.reports[-1]] == list(names)
        )


@pytest.fixture
async def api() -> AsyncIterator[FakeApiServer]:
    server = FakeApiServer("/api/v1/namespaces/ns/pods", labelSelector=f"{LABEL_MODEL}=toy")
    await server.start()
    yield server
    server.stop()
    await asyncio.sleep(0.02)


@pytest.fixture
async def watch(api: FakeApiServer, tmp_path: Path) -> AsyncIterator[Watch]:
    token = tmp_path / "token"
    token.write_text("first\n")
    api.items = [make_pod("a"), make_pod("b", status_conditions=[])]
    found = Watch(api, token)
    yield found
    found.task.cancel()
    await asyncio.gather(found.task, return_exceptions=True)


async def test_list_then_watch(api: FakeApiServer, watch: Watch) -> None:
    await watch.until_names("a")
    api.events.put_nowait({"type": "MODIFIED", "object": make_pod("b", version="11")})
    await watch.until_names("a", "b")
    api.events.put_nowait({"type": "MODIFIED", "object": make_pod("a", version="12", status_conditions=[])})
    await watch.until_names("b")
    api.events.put_nowait({"type": "DELETED", "object": make_pod("b", version="13")})
    await watch.until_names()
    assert api.watches[0]["resourceVersion"] == "10"
    assert api.watches[0]["allowWatchBookmarks"] == "true"


async def test_changes_that_do_not_matter_are_not_reported(api: FakeApiServer, watch: Watch) -> None:
    await watch.until_names("a")
    api.events.put_nowait({"type": "MODIFIED", "object": make_pod("a", version="11")})
    api.events.put_nowait({"type": "ADDED", "object": make_pod("c", version="12")})
    await watch.until_names("a", "c")
    assert len(watch.reports) == 2


async def test_a_group_is_reported_once_whole_and_withdrawn_when_any_pod_goes(api: FakeApiServer, watch: Watch) -> None:
    await watch.until_names("a")
    for number in (0, 1):
        event = make_pod(f"toy-decode-{number}", nodes=2, ip=f"10.0.1.{number}", version=f"2{number}")
        api.events.put_nowait({"type": "ADDED", "object": event})
    await watch.until_names("a", "toy-decode-0")
    follower = make_pod("toy-decode-1", nodes=2, ip="10.0.1.1", version="22", status_conditions=[])
    api.events.put_nowait({"type": "MODIFIED", "object": follower})
    await watch.until_names("a")
    assert len(watch.reports) == 3, "what does not change the workers is not reported"


async def test_a_watch_goes_on_from_the_last_bookmark_without_a_list(api: FakeApiServer, watch: Watch) -> None:
    await watch.until_names("a")
    api.events.put_nowait({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "99"}}})
    api.events.put_nowait(None)
    await watch.until(lambda: len(api.watches) == 2)
    assert api.watches[1]["resourceVersion"] == "99"
    assert len(api.lists) == 1


@pytest.mark.parametrize("as_event", [True, False])
async def test_a_version_too_old_lists_again(api: FakeApiServer, watch: Watch, as_event: bool) -> None:
    await watch.until_names("a")
    api.items = [make_pod("z", ip="10.0.0.9")]
    if as_event:
        status = {"kind": "Status", "code": 410, "message": "too old resource version"}
        api.events.put_nowait({"type": "ERROR", "object": status})
    else:
        api.refuse = [410]
    api.events.put_nowait(None)
    await watch.until_names("z")
    assert len(api.lists) == 2


async def test_a_silent_watch_is_opened_anew(api: FakeApiServer, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    api.items = [make_pod("a")]
    found = Watch(api, tmp_path / "token", silence_seconds=0.4)
    await found.until(lambda: len(api.watches) >= 2)
    assert found.reports == [["a@10.0.0.1:8000"]]
    found.task.cancel()
    await asyncio.gather(found.task, return_exceptions=True)


async def test_losing_the_api_server_keeps_the_workers(api: FakeApiServer, watch: Watch) -> None:
    await watch.until_names("a")
    await watch.until(lambda: len(api.watches) == 1)
    api.stop()
    await asyncio.sleep(0.3)
    assert watch.reports == [["a@10.0.0.1:8000"]]
    api.events = asyncio.Queue()
    await api.start(api.port)
    api.events.put_nowait({"type": "ADDED", "object": make_pod("c", version="20")})
    await watch.until_names("a", "c")


async def test_the_token_is_read_again_for_every_connection(api: FakeApiServer, watch: Watch) -> None:
    await watch.until(lambda: len(api.watches) == 1)
    watch.token.write_text("second")
    api.events.put_nowait(None)
    await watch.until(lambda: len(api.watches) == 2)
    assert api.tokens == ["first", "first", "second"]


@pytest.mark.parametrize("status", [401, 403, 429, 500])
async def test_refusals_are_tried_again(api: FakeApiServer, tmp_path: Path, status: int) -> None:
    api.refuse = [status, status]
    api.items = [make_pod("a")]
    (tmp_path / "token").write_text("t")
    found = Watch(api, tmp_path / "token")
    await found.until_names("a")
    assert len(api.lists) == 3
    found.task.cancel()
    await asyncio.gather(found.task, return_exceptions=True)


def test_outside_a_cluster_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="--worker"):
        ApiServer.in_cluster()


def resting(name: str, *, ended: int = 0, **changes: object) -> dict[str, object]:
    """A pod that has started and is not ready."""
    pod = make_pod(name, status_conditions=[], **changes)  # type: ignore[arg-type]
    pod["metadata"]["uid"] = f"uid-{name}"
    pod["status"]["containerStatuses"] = [{"name": "worker", "started": True, "restartCount": ended}]
    return pod


async def find_sleeper(api: FakeApiServer, watch: Watch) -> Sleeper:
    """The pod b, which has started."""
    await watch.until_names("a")
    api.events.put_nowait({"type": "MODIFIED", "object": resting("b")})
    await watch.until(lambda: [one.pod for one in watch.sleepers] == ["uid-b/0"])
    return watch.sleepers[0]


async def test_a_worker_that_says_that_it_serves_is_one_before_kubernetes_knows(
    api: FakeApiServer, watch: Watch
) -> None:
    watch.watcher.admit(await find_sleeper(api, watch))
    await watch.until_names("a", "b")
    api.events.put_nowait({"type": "MODIFIED", "object": make_pod("b", version="12")})
    await watch.until(lambda: watch.sleepers == [])
    await watch.until_names("a", "b")
    api.events.put_nowait({"type": "MODIFIED", "object": resting("b")})
    await watch.until_names("a")


@pytest.mark.parametrize(("kind", "ended"), [("DELETED", 0), ("MODIFIED", 1)])
async def test_a_worker_that_serves_no_more_is_none(api: FakeApiServer, watch: Watch, kind: str, ended: int) -> None:
    """Its pod is gone, or its container has ended."""
    sleeper = await find_sleeper(api, watch)
    watch.watcher.admit(sleeper)
    await watch.until_names("a", "b")
    api.events.put_nowait({"type": kind, "object": resting("b", ended=ended)})
    await watch.until_names("a")
    watch.watcher.admit(sleeper)
    assert [name.split("@")[0] for name in watch.reports[-1]] == ["a"], "it speaks of another process"


async def test_one_that_never_gets_ready_is_dismissed(
    api: FakeApiServer, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ADMITTED_SECONDS", 0.1)
    watch.watcher.admit(await find_sleeper(api, watch))
    await watch.until(lambda: len(watch.reports) == 3)
    assert [[item.split("@")[0] for item in report] for report in watch.reports] == [["a"], ["a", "b"], ["a"]]
