"""Asking a hub over real HTTP: the mirror that the clusters use, and one that says anything."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from api_double import api_client, serving
from tandem_api.crd.model import SecretKey
from tandem_operator.kube.client import KubeClient
from tandem_operator.objects.manifests import ModelKey
from tandem_operator.weights.commits import CommitAnswer, CommitQuestion
from tandem_operator.weights.hub import Hub, HubPolicy

from e2e.mirror.server import MirrorServer

KEY = ModelKey("n", "m")
TOKEN = "sesame"
SHA = "a" * 40


class Asker:
    """A hub's client whose clock the test moves, and an API server that has one Secret."""

    def __init__(self) -> None:
        self.now = 0.0
        self.answered = asyncio.Event()
        self.secret: dict[str, Any] | None = None
        self.secret_status = 200
        self.hub: Hub

    async def handle(self, request: web.Request) -> web.Response:
        assert request.path == "/api/v1/namespaces/n/secrets/hub-token"
        if self.secret_status != 200:
            return web.json_response({"message": 'cannot get resource "secrets"'}, status=self.secret_status)
        found = self.secret
        return web.json_response(found or {"message": "not found"}, status=404 if found is None else 200)

    def keep_token(self, token: str, key: str = "token") -> None:
        self.secret = {"data": {key: base64.b64encode(token.encode()).decode()}}

    async def ask(self, question: CommitQuestion) -> CommitAnswer:
        """What is known once the hub has been asked."""
        self.answered.clear()
        if self.hub.ask(KEY, question) is None:
            async with asyncio.timeout(60):
                await self.answered.wait()
        answer = self.hub.ask(KEY, question)
        assert answer is not None
        return answer

    async def fail(self, question: CommitQuestion) -> tuple[str, bool, str]:
        answer = await self.ask(question)
        assert answer.commit is None
        assert answer.problem is not None
        assert answer.problem.from_worker or answer.problem.reason == "Forbidden"
        return answer.problem.reason, answer.problem.stalled, answer.problem.message


@pytest.fixture
async def asker() -> AsyncIterator[Asker]:
    made = Asker()
    async with serving(made.handle) as url:
        client = KubeClient(api_client(url, 2))
        made.hub = Hub(
            client, HubPolicy(poll_seconds=600), on_answer=lambda _: made.answered.set(), clock=lambda: made.now
        )
        yield made
        await made.hub.close()
        await client.close()


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[tuple[str, MirrorServer]]:
    for repository in ("org/public", "org/private"):
        (tmp_path / repository).mkdir(parents=True)
        (tmp_path / repository / "config.json").write_text("{}")
    (tmp_path / "org/private/.private").write_text(f"{TOKEN}\n")
    server = MirrorServer(("127.0.0.1", 0), tmp_path)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", server
    server.shutdown()
    thread.join()
    server.server_close()


def about(endpoint: str, repository: str = "org/public", **fields: Any) -> CommitQuestion:
    return CommitQuestion(endpoint=endpoint, repository=repository, **{"revision": "main"} | fields)


async def test_a_branch_is_resolved_and_its_move_is_seen_when_it_is_time(
    asker: Asker, mirror: tuple[str, MirrorServer]
) -> None:
    endpoint, server = mirror
    before = await asker.ask(about(endpoint))
    assert before.commit == server.repositories.branch("org/public")
    moved = server.repositories.move("org/public")
    asker.now = 599
    assert await asker.ask(about(endpoint)) == before
    assert asker.hub.look_after(KEY) == 1
    asker.now = 601
    asker.answered.clear()
    assert asker.hub.ask(KEY, about(endpoint)) == before, "what is known holds meanwhile"
    await asyncio.wait_for(asker.answered.wait(), 60)
    assert (await asker.ask(about(endpoint))).commit == moved


async def test_a_wish_is_a_question_of_its_own(asker: Asker, mirror: tuple[str, MirrorServer]) -> None:
    endpoint, server = mirror
    await asker.ask(about(endpoint))
    moved = server.repositories.move("org/public")
    assert (await asker.ask(about(endpoint, request="now"))).commit == moved


async def test_a_private_repository_opens_with_the_token_of_the_secret(
    asker: Asker, mirror: tuple[str, MirrorServer]
) -> None:
    endpoint, server = mirror
    private = about(endpoint, "org/private", secret=SecretKey(name="hub-token"))
    reason, stalled, message = await asker.fail(private)
    assert (reason, stalled) == ("SecretNotFound", True)
    assert "hub-token" in message
    asker.keep_token(TOKEN, key="other")
    asker.now += 100
    asker.answered.clear()
    asker.hub.ask(KEY, private)
    await asyncio.wait_for(asker.answered.wait(), 60)
    assert "no key 'token'" in (await asker.fail(private))[2]
    asker.keep_token(f"{TOKEN}\n")
    asker.hub.forget(KEY)
    assert (await asker.ask(private)).commit == server.repositories.branch("org/private")
    asker.keep_token("wrong")
    asker.hub.forget(KEY)
    reason, stalled, message = await asker.fail(private)
    assert (reason, stalled) == ("AccessDenied", True)
    assert "does not open it" in message
    assert "wrong" not in message
    asker.secret_status = 403
    asker.hub.forget(KEY)
    assert (await asker.fail(private))[0] == "Forbidden"


@pytest.mark.parametrize(
    ("repository", "revision", "reason"),
    [("org/absent", "main", "ModelNotFound"), ("org/public", "refs/pr/7", "RevisionNotFound")],
)
async def test_what_is_not_there_is_named(
    asker: Asker, mirror: tuple[str, MirrorServer], repository: str, revision: str, reason: str
) -> None:
    found = await asker.fail(about(mirror[0], repository, revision=revision))
    assert found[:2] == (reason, True)
    assert repository in found[2]


@pytest.mark.parametrize(
    ("can_wait", "expected"),
    [(False, [4, 8, 16, 32, 60, 60, 60, 60, 60]), (True, [4, 8, 16, 32, 64, 128, 256, 512, 600])],
)
async def test_a_hub_that_is_away_is_asked_again_ever_later(
    asker: Asker, can_wait: bool, expected: list[float]
) -> None:
    gone = about("http://127.0.0.1:9")
    waits: list[float] = []
    for _ in expected:
        asker.answered.clear()
        answer = asker.hub.ask(KEY, gone, can_wait=can_wait)
        assert asker.hub.look_after(KEY) is None, "it is being asked"
        await asyncio.wait_for(asker.answered.wait(), 60)
        waits.append(asker.hub.look_after(KEY) or 0)
        asker.now += waits[-1]
    assert waits == expected
    answer = asker.hub.ask(KEY, gone)
    assert answer is not None
    assert answer.problem is not None
    assert (answer.problem.reason, answer.problem.stalled) == ("HubUnreachable", False)
    assert "hub.resolve=false" in answer.problem.message


Reply = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture
async def answering(asker: Asker) -> AsyncIterator[Callable[[Reply], Awaitable[CommitAnswer]]]:
    """Asks a hub that answers as a function says."""
    reply: list[Reply] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        return await reply[-1](request)

    async with serving(handle) as url:

        async def ask(how: Reply) -> CommitAnswer:
            reply.append(how)
            asker.hub.forget(KEY)
            return await asker.ask(about(url, revision="feature/x"))

        yield ask


async def test_the_question_is_quoted_and_wants_the_commit_alone(
    answering: Callable[[Reply], Awaitable[CommitAnswer]],
) -> None:
    asked: list[str] = []

    async def reply(request: web.Request) -> web.Response:
        asked.append(request.raw_path)
        assert "Authorization" not in request.headers
        return web.json_response({"id": "org/public", "sha": SHA})

    assert (await answering(reply)).commit == SHA
    assert asked == ["/api/models/org/public/revision/feature%2Fx?expand=sha"]


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b'{"sha": "main"}', b'{"sha": null}', b"<html>", b'{"sha": "' + b"a" * 5_000_000 + b'"}']
)
async def test_nonsense_is_told_and_never_believed(
    answering: Callable[[Reply], Awaitable[CommitAnswer]], body: bytes
) -> None:
    async def reply(_: web.Request) -> web.Response:
        return web.Response(body=body)

    answer = await answering(reply)
    assert answer.problem is not None
    assert (answer.problem.reason, answer.problem.stalled) == ("HubAnswerInvalid", True)
    assert len(answer.problem.message) < 600


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_hub_in_trouble_is_one_that_is_away(
    answering: Callable[[Reply], Awaitable[CommitAnswer]], status: int
) -> None:
    async def reply(_: web.Request) -> web.Response:
        return web.Response(status=status)

    answer = await answering(reply)
    assert answer.problem is not None
    assert (answer.problem.reason, answer.problem.stalled) == ("HubUnreachable", False)
    assert str(status) in answer.problem.message


async def test_a_token_goes_to_no_other_host(asker: Asker) -> None:
    """A hub may send on to another name of a repository, and a hostile one anywhere."""
    seen: list[str | None] = []

    async def elsewhere(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        return web.json_response({"sha": SHA})

    async with serving(elsewhere) as other:

        async def hub(_: web.Request) -> web.Response:
            raise web.HTTPTemporaryRedirect(other.replace("127.0.0.1", "localhost"))

        async with serving(hub) as url:
            asker.keep_token(TOKEN)
            answer = await asker.ask(about(url, secret=SecretKey(name="hub-token")))
    assert (answer.commit, seen) == (SHA, [None])
