"""The Secret with a model's keys over real HTTP, against a server that keeps Secrets as the API server does."""

from __future__ import annotations

import base64
import copy
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from api_double import serving
from kubernetes.aio.client import ApiClient, Configuration
from operator_objects import UID, blueprint
from tandem_api.keys import KeyRing, parse_key_ring
from tandem_operator.keys.keeper import KeyKeeper, KeyLook
from tandem_operator.keys.rotation import KeyPolicy
from tandem_operator.keys.secret import rotation_request
from tandem_operator.kube.client import KubeClient
from tandem_operator.objects.errors import APIError, ConflictError

SETTLE = 180.0
COLLECTION = "/api/v1/namespaces/n/secrets"
PATH = f"{COLLECTION}/m-keys"


class SecretServer:
    """Secrets with optimistic locking. `status` is answered to everything, where it is set."""

    def __init__(self) -> None:
        self.kept: dict[str, dict[str, Any]] = {}
        self.requests: list[tuple[str, str]] = []
        self.status = self.refuse_writes = 0
        self.overtake = False
        """Somebody else writes after every read."""
        self.version = 0
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        self.requests.append((request.method, request.path))
        if self.status:
            return web.json_response({"message": "no"}, status=self.status)
        if request.method == "GET":
            answer = self.answer(self.kept.get(request.path))
            if self.overtake:
                self.put(request.path, self.kept[request.path])
            return answer
        if self.refuse_writes:
            return web.json_response({"message": "field is immutable"}, status=self.refuse_writes)
        body = await request.json()
        path = request.path if request.method == "PUT" else f"{request.path}/{body['metadata']['name']}"
        present = self.kept.get(path, {"metadata": {}})["metadata"].get("resourceVersion")
        if body["metadata"].get("resourceVersion") != present:
            return web.json_response({"message": "conflict"}, status=409)
        self.put(path, body)
        return self.answer(self.kept[path])

    def put(self, path: str, body: dict[str, Any]) -> None:
        self.version += 1
        self.kept[path] = copy.deepcopy(body)
        self.kept[path]["metadata"]["resourceVersion"] = str(self.version)

    @staticmethod
    def answer(found: dict[str, Any] | None) -> web.Response:
        if found is None:
            return web.json_response({"message": "not found"}, status=404)
        return web.json_response(found)

    @property
    def secret(self) -> dict[str, Any]:
        return self.kept[PATH]

    def ring(self, file: str) -> KeyRing:
        return parse_key_ring(base64.b64decode(self.secret["data"][file]))

    def write_ring(self, file: str, text: str | None) -> None:
        data = dict(self.secret["data"])
        data.pop(file) if text is None else data.update({file: base64.b64encode(text.encode()).decode()})
        self.put(PATH, self.secret | {"data": data})


@pytest.fixture
async def server() -> AsyncIterator[SecretServer]:
    secrets = SecretServer()
    async with serving(secrets.handle) as secrets.url:
        yield secrets


class Clock:
    def __init__(self) -> None:
        self.now = 1_750_000_000.0

    def __call__(self) -> float:
        return self.now


class Keeping:
    """A keeper, its clock, and looks at model `m`."""

    def __init__(self, client: KubeClient) -> None:
        self.clock = Clock()
        self.keeper = KeyKeeper(client, KeyPolicy(settle_seconds=SETTLE), clock=self.clock)

    async def look(self, request: str | None = None, *, after: float = 0.0) -> KeyLook:
        self.clock.now += after
        return await self.keeper.ensure(blueprint(), request)


@pytest.fixture
async def keeping(server: SecretServer) -> AsyncIterator[Keeping]:
    configuration = Configuration()
    configuration.host = server.url
    client = KubeClient(ApiClient(configuration))
    yield Keeping(client)
    await client.close()


def annotations(server: SecretServer) -> dict[str, str]:
    return server.secret["metadata"]["annotations"]


async def test_absent_keys_are_made_once(server: SecretServer, keeping: Keeping) -> None:
    made = await keeping.look()
    assert made.usable
    assert made.happening is not None
    assert made.happening.reason == "KeysMade"
    (owner,) = server.secret["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["controller"]) == (UID, True)
    assert server.secret["metadata"]["labels"]["tandem.dev/model"] == "m"
    peers, api = server.ring("peers.json"), server.ring("api.json")
    assert len({*peers.keys.values(), *api.keys.values()}) == 2, "a gateway cannot speak as a worker"
    before = copy.deepcopy(server.secret)
    for _ in range(3):
        again = await keeping.look(after=1e6)
        assert again == KeyLook(look_after_seconds=None)
    assert server.secret == before


async def test_only_one_secret_is_asked_for_and_by_its_name(server: SecretServer, keeping: Keeping) -> None:
    """What the chart's permissions rest on: get, create, update; nothing is listed, watched, patched or deleted."""
    await keeping.look()
    for _ in range(4):
        await keeping.look("go", after=SETTLE)
    assert set(server.requests) == {("GET", PATH), ("POST", COLLECTION), ("PUT", PATH)}


async def test_a_rotation_by_annotation(server: SecretServer, keeping: Keeping) -> None:
    await keeping.look()
    old = server.ring("peers.json").primary
    request = rotation_request({"metadata": {"annotations": {"tandem.dev/rotate-keys": "2026-01-01"}}})
    early = await keeping.look(request, after=60.0)
    assert (early.happening, early.look_after_seconds) == (None, SETTLE - 60.0)
    told, wait = [], SETTLE
    for expected in (2, 2, 1):
        look = await keeping.look(request, after=wait)
        assert look.happening is not None
        told.append((look.happening.reason, look.happening.message.split(": ")[1]))
        assert {len(server.ring(file).keys) for file in ("peers.json", "api.json")} == {expected}
        assert look.look_after_seconds == SETTLE
    assert told == [("RotatingKeys", "1 of 3"), ("RotatingKeys", "2 of 3"), ("KeysRotated", "3 of 3")]
    assert old not in server.ring("peers.json").keys
    noted = annotations(server)
    assert (noted["tandem.dev/keys-step"], noted["tandem.dev/rotate-keys"]) == ("Retired", "2026-01-01")
    assert noted["tandem.dev/keys-since"] == "2025-06-15T15:16:40.000Z"
    assert await keeping.look(request, after=1e6) == KeyLook(look_after_seconds=None)


async def test_a_restarted_operator_goes_on_where_it_was(server: SecretServer, keeping: Keeping) -> None:
    await keeping.look()
    await keeping.look("go", after=SETTLE)
    fresh = Keeping(keeping.keeper._client)
    fresh.clock.now = keeping.clock.now
    assert (await fresh.look("go", after=SETTLE - 1)).happening is None
    look = await fresh.look("go", after=1)
    assert look.happening is not None
    assert "2 of 3" in look.happening.message


async def test_a_deleted_secret_is_made_anew_with_other_keys(server: SecretServer, keeping: Keeping) -> None:
    await keeping.look()
    old = server.ring("api.json")
    del server.kept[PATH]
    look = await keeping.look()
    assert look.happening is not None
    assert not set(old.keys) & set(server.ring("api.json").keys)


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("api.json", None, "has no api.json"),
        ("peers.json", "", "peers.json cannot be read: it is not a key ring"),
        ("peers.json", '{"primary": "a", "keys": {"a": "beef"}}', "key a has 2 bytes"),
        ("api.json", '{"primary": "b", "keys": {"a": "' + "ab" * 32 + '"}}', "primary key is not among its keys"),
    ],
)
async def test_a_malformed_secret_is_named_and_left_alone(
    server: SecretServer, keeping: Keeping, file: str, text: str | None, says: str
) -> None:
    await keeping.look()
    server.write_ring(file, text)
    before = copy.deepcopy(server.secret)
    look = await keeping.look("go", after=1e6)
    assert not look.usable
    assert look.problem is not None
    assert (look.problem.reason, look.problem.stalled) == ("KeysUnreadable", True)
    assert says in look.problem.message
    assert "delete the Secret" in look.problem.message
    assert "abab" not in look.problem.message
    assert server.secret == before
    del server.kept[PATH]
    assert (await keeping.look()).usable


async def test_a_secret_of_somebody_else_is_not_taken(server: SecretServer, keeping: Keeping) -> None:
    server.put(PATH, {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "m-keys", "namespace": "n"}})
    look = await keeping.look()
    assert not look.usable
    assert [str(key) for key in look.taken] == ["Secret m-keys"]
    assert "data" not in server.secret


async def test_the_secret_of_an_earlier_model_is_waited_for(server: SecretServer, keeping: Keeping) -> None:
    await keeping.look()
    secret = copy.deepcopy(server.secret)
    secret["metadata"]["ownerReferences"][0]["uid"] = "earlier"
    server.put(PATH, secret)
    look = await keeping.look()
    assert not look.usable
    assert [str(key) for key in look.waiting] == ["Secret m-keys"]


async def test_an_orphan_is_adopted_with_its_keys(server: SecretServer, keeping: Keeping) -> None:
    await keeping.look()
    ring = server.ring("api.json")
    secret = copy.deepcopy(server.secret)
    del secret["metadata"]["ownerReferences"]
    secret["metadata"]["labels"]["team"] = "search"
    secret["data"]["extra"] = "eA=="
    server.put(PATH, secret)
    assert (await keeping.look()).usable
    assert server.secret["metadata"]["ownerReferences"][0]["uid"] == UID
    assert server.secret["metadata"]["labels"]["team"] == "search"
    assert server.secret["data"]["extra"] == "eA=="
    assert server.ring("api.json") == ring
    writes = len(server.requests)
    await keeping.look()
    assert len(server.requests) == writes + 1, "adopted once"


async def test_annotations_that_were_edited_lose_time_and_no_keys(server: SecretServer, keeping: Keeping) -> None:
    await keeping.look()
    await keeping.look("go", after=SETTLE)
    for since in ("yesterday", "2126-01-01T00:00:00Z", "2020-01-01T00:00:00"):
        secret = copy.deepcopy(server.secret)
        secret["metadata"]["annotations"] |= {"tandem.dev/keys-since": since, "tandem.dev/keys-step": "?"}
        server.put(PATH, secret)
        look = await keeping.look("go", after=1e6)
        assert (look.happening, look.look_after_seconds) == (None, SETTLE)
        assert len(server.ring("api.json").keys) == 2
    look = await keeping.look("go", after=SETTLE)
    assert look.happening is not None
    assert "2 of 3" in look.happening.message


async def test_a_refusal_is_a_condition_and_a_race_is_tried_again(server: SecretServer, keeping: Keeping) -> None:
    server.status = 403
    look = await keeping.look()
    assert look.problem is not None
    assert (look.problem.reason, look.usable) == ("Forbidden", False)
    server.status = 500
    with pytest.raises(APIError):
        await keeping.look()
    server.status = 0
    await keeping.look()
    server.overtake = True
    with pytest.raises(ConflictError):
        await keeping.look("go", after=SETTLE)
    assert len(server.ring("api.json").keys) == 1
    server.overtake = False
    assert (await keeping.look("go")).happening is not None


async def test_keys_that_cannot_be_changed_still_serve(server: SecretServer, keeping: Keeping) -> None:
    """Of a Secret that somebody made immutable, or without permission to update it."""
    await keeping.look()
    for status in (422, 403):
        server.refuse_writes = status
        look = await keeping.look("go", after=SETTLE)
        assert look.problem is not None
        assert look.usable


async def test_no_key_is_logged(server: SecretServer, keeping: Keeping, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    looks = [await keeping.look()]
    looks += [await keeping.look("go", after=SETTLE) for _ in range(3)]
    secrets = {key.hex() for file in ("peers.json", "api.json") for key in server.ring(file).keys.values()}
    told = json.dumps(annotations(server)) + caplog.text + repr(looks)
    assert not [secret for secret in secrets if secret in told or secret[:16] in told]
