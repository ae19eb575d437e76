"""Asks a Hugging Face-compatible hub which commit a revision is, beside the work on models: nobody waits for a hub.

What was answered last is remembered until it is old; what it means is decided in `commits`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import quote

import aiohttp
from tandem_api.crd.model import SecretKey

from tandem_operator.kube.client import KubeClient
from tandem_operator.objects.errors import APIError
from tandem_operator.objects.manifests import SECRET, ModelKey, dig
from tandem_operator.objects.problem import Problem
from tandem_operator.objects.refusals import refusal
from tandem_operator.runtime import metrics
from tandem_operator.weights.commits import CommitAnswer, CommitQuestion, is_commit

_LIMITS = aiohttp.ClientTimeout(total=20, sock_connect=5, sock_read=10)
_MAX_ANSWER_BYTES = 4 * 1024 * 1024
_MAX_REDIRECTS = 5
_AT_A_TIME = 8
_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS = 2.0, 60.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubPolicy:
    """When the hub is asked which commit a branch or tag is."""

    resolve: bool = True
    """False: never, each worker does so for itself."""
    poll_seconds: float = 600.0
    """Between two questions whether a branch has moved."""


@dataclass(slots=True)
class _Asked:
    """One model's question and what came of it."""

    question: CommitQuestion
    answer: CommitAnswer | None = None
    at: float = 0.0
    """When it was last answered, by the clock."""
    failures: int = 0
    can_wait: bool = False
    task: asyncio.Task[None] | None = None


class Hub:
    def __init__(
        self,
        client: KubeClient,
        policy: HubPolicy,
        *,
        on_answer: Callable[[ModelKey], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_answer` is told whose question has been answered, or has failed."""
        self.policy = policy
        self._client = client
        self._on_answer = on_answer
        self._clock = clock
        self._asked: dict[tuple[ModelKey, str], _Asked] = {}
        """Keyed by model, and by what of it names the repository."""
        self._places = asyncio.Semaphore(_AT_A_TIME)
        self._session: aiohttp.ClientSession | None = None

    def ask(self, key: ModelKey, question: CommitQuestion, *, can_wait: bool = False) -> CommitAnswer | None:
        """The latest answer; None before the first. Where it is old, or was none, the hub is asked again meanwhile;
        after failures ever later, up to a minute, or where it `can_wait` up to the time between two questions."""
        asked = self._asked.get((key, question.path))
        if asked is None or asked.question != question:
            self.forget(key, question.path)
            asked = self._asked[key, question.path] = _Asked(question)
        asked.can_wait = can_wait
        if asked.task is None and self._seconds_left(asked) <= 0:
            asked.task = asyncio.create_task(self._run(key, asked), name=f"hub {key}")
        return asked.answer

    def look_after(self, key: ModelKey) -> float | None:
        """Seconds until something should be asked again; None while it is being asked, or where nothing was."""
        asked = [asked for (model, _), asked in self._asked.items() if model == key and asked.task is None]
        return min((max(0.0, self._seconds_left(each)) for each in asked), default=None)

    def forget(self, key: ModelKey, path: str | None = None) -> None:
        """What was asked of a model, or of what `path` names alone."""
        for known in [each for each in self._asked if each[0] == key and path in (None, each[1])]:
            asked = self._asked.pop(known)
            if asked.task is not None:
                asked.task.cancel()

    async def close(self) -> None:
        tasks = [asked.task for asked in self._asked.values() if asked.task is not None]
        for key, _ in list(self._asked):
            self.forget(key)
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def _seconds_left(self, asked: _Asked) -> float:
        if asked.answer is None:
            return 0.0
        pause = self.policy.poll_seconds
        if asked.failures:
            last = pause if asked.can_wait else _LAST_RETRY_SECONDS
            pause = min(_FIRST_RETRY_SECONDS * 2 ** min(asked.failures, 16), last)
        return asked.at + pause - self._clock()

    async def _run(self, key: ModelKey, asked: _Asked) -> None:
        async with self._places:
            answer = await self._answer(key, asked.question)
        asked.failures = 0 if answer.problem is None else asked.failures + 1
        asked.answer, asked.at, asked.task = answer, self._clock(), None
        metrics.HUB_QUESTIONS.labels("resolved" if answer.problem is None else answer.problem.reason).inc()
        if answer.problem is not None:
            log.warning("the hub does not name a commit", extra={"model": str(key), "error": answer.problem.message})
        self._on_answer(key)

    async def _answer(self, key: ModelKey, question: CommitQuestion) -> CommitAnswer:
        token: str | None = None
        try:
            if question.secret is not None:
                token = await self._read_token(key, question, question.secret)
            return await self._fetch(question, token)
        except _RefusedError as error:
            return CommitAnswer(problem=error.problem)
        except (APIError, aiohttp.ClientError, TimeoutError, ValueError) as error:
            said = str(error) or type(error).__name__
            return CommitAnswer(problem=_unreachable(question, said))
        except Exception as error:
            # A defect met by one model must not leave it without an answer for ever.
            log.exception("asking the hub failed", extra={"model": str(key)})
            return CommitAnswer(problem=_unreachable(question, repr(error)))

    async def _read_token(self, key: ModelKey, question: CommitQuestion, secret: SecretKey) -> str:
        try:
            found = await self._client.find(SECRET.path(key.namespace, secret.name))
        except (APIError, aiohttp.ClientError, TimeoutError) as error:
            raise _RefusedError(refusal(f"Secret {secret.name}", error, doing="read")) from error
        text = dig(found, "data", secret.key)
        what = f"Secret {secret.name}, which {question.path}.secretRef names,"
        if found is None:
            raise _refused("SecretNotFound", f"{what} does not exist in this namespace: create it")
        if text is None:
            raise _refused("SecretNotFound", f"{what} has no key {secret.key!r}: add it, or name another key")
        try:
            token = base64.b64decode(text, validate=True).decode("ascii").strip()
        except (binascii.Error, UnicodeDecodeError):
            token = ""
        if not token or not token.isprintable():
            raise _refused("SecretNotFound", f"{what} holds no access token under {secret.key!r}: correct it")
        return token

    async def _fetch(self, question: CommitQuestion, token: str | None) -> CommitAnswer:
        session = self._session = self._session or aiohttp.ClientSession(timeout=_LIMITS, trust_env=True)
        # The name of the commit alone: repositories list thousands of files otherwise.
        path = f"/api/models/{quote(question.repository)}/revision/{quote(question.revision, safe='')}?expand=sha"
        headers = {"Accept": "application/json"} | ({} if token is None else {"Authorization": f"Bearer {token}"})
        url = f"{question.endpoint}{path}"
        async with session.get(url, headers=headers, max_redirects=_MAX_REDIRECTS) as response:
            if response.status != 200:
                raise _explain(question, response, has_token=token is not None)
            text = b""
            while len(text) < _MAX_ANSWER_BYTES and (part := await response.content.readany()):
                text += part
        return CommitAnswer(commit=_read_commit(question, text))


class _RefusedError(Exception):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def _refused(reason: str, message: str) -> _RefusedError:
    return _RefusedError(Problem(reason=reason, message=message, stalled=True, from_worker=True))


def _unreachable(question: CommitQuestion, said: str) -> Problem:
    text = f"the operator cannot ask the hub {question.endpoint} which commit {question.revision} of"
    advice = "trying again; let the operator connect to it, or have each worker resolve it by hub.resolve=false"
    message = f"{text} {question.repository} is: {' '.join(said.split())[:300]}; {advice}"
    return Problem(reason="HubUnreachable", message=message, from_worker=True)


def _explain(question: CommitQuestion, response: aiohttp.ClientResponse, *, has_token: bool) -> _RefusedError:
    repository, endpoint, path = question.repository, question.endpoint, question.path
    code = response.headers.get("X-Error-Code", "")
    if code == "RevisionNotFound":
        return _refused(code, f"{repository} has no revision {question.revision!r} at {endpoint}: correct {path}")
    if code == "GatedRepo":
        text = f"{repository} is gated: accept its terms at {endpoint} and give an access token in {path}.secretRef"
        return _refused("AccessDenied", text)
    if response.status in (401, 403):
        means = f"the token of {path}.secretRef does not open it" if has_token else "no token was given"
        text = f"{endpoint} denies access to {repository}: it is private or does not exist, and {means}"
        return _refused("AccessDenied", f"{text}; check {path}.uri and {path}.secretRef")
    if response.status == 404:
        return _refused("ModelNotFound", f"there is no repository {repository} at {endpoint}: correct {path}.uri")
    return _RefusedError(_unreachable(question, f"it answered with status {response.status}"))


def _read_commit(question: CommitQuestion, text: bytes) -> str:
    said = f"{question.endpoint} does not say which commit {question.revision} of {question.repository} is"
    try:
        commit = dig(json.loads(text[:_MAX_ANSWER_BYTES]), "sha")
    except ValueError as error:
        raise _refused("HubAnswerInvalid", f"{said}: {error}; is it a Hugging Face-compatible hub?") from error
    if not isinstance(commit, str) or not is_commit(commit):
        named = f"{str(commit)[:100]!r} is not the 40 or 64 hexadecimal digits of one"
        raise _refused("HubAnswerInvalid", f"{said}: {named}; is it a Hugging Face-compatible hub?")
    return commit
