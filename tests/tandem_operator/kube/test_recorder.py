from __future__ import annotations

from typing import Any

from tandem_operator.kube.recorder import EventRecorder
from tandem_operator.objects.errors import ConflictError
from tandem_operator.objects.happening import Happening
from tandem_operator.objects.manifests import Manifest, ModelKey

KEY = ModelKey("n", "m")


class FakeEvents:
    """Keeps Events by path."""

    def __init__(self) -> None:
        self.kept: dict[str, Manifest] = {}

    async def get(self, path: str) -> Manifest:
        return self.kept[path]

    async def create(self, path: str, body: Manifest) -> Manifest:
        path = f"{path}/{body['metadata']['name']}"
        if path in self.kept:
            raise ConflictError(409, "there is one")
        self.kept[path] = body
        return body

    async def replace(self, path: str, body: Manifest) -> Manifest:
        assert path in self.kept
        self.kept[path] = body
        return body


async def test_what_repeats_is_counted_and_what_differs_is_not() -> None:
    events: Any = FakeEvents()
    recorder = EventRecorder(events, instance="one")
    crash = Happening(kind="Warning", reason="CrashLoopBackOff", message="Pod m-decode-0: ended")
    for happening in (crash, Happening(reason="Recovered", message="no longer stalled"), crash, crash):
        await recorder.record(KEY, "uid", happening)
    await recorder.record(KEY, "uid of a later model", crash)
    assert sorted((event["reason"], event["count"]) for event in events.kept.values()) == [
        ("CrashLoopBackOff", 1), ("CrashLoopBackOff", 3), ("Recovered", 1)
    ]  # fmt: skip
