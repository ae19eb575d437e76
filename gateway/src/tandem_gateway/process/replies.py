"""Answers that the gateway gives by itself: of models, of its own state, refusals, and what browsers ask before."""

from __future__ import annotations

from urllib.parse import unquote

from tandem_gateway.errors import NotRouted, RequestError
from tandem_gateway.http.budget import FREE_BYTES
from tandem_gateway.http.connection import ClientConnection
from tandem_gateway.http.request import Request
from tandem_gateway.http.response import build_empty, build_error, build_json
from tandem_gateway.paths import MODELS
from tandem_gateway.process.gateway import Gateway
from tandem_gateway.process.surroundings import Surroundings
from tandem_gateway.requests.cors import CORSPolicy
from tandem_gateway.requests.own_answers import OWN_PATHS, answer_own
from tandem_gateway.requests.prompt import check_name
from tandem_gateway.responses.service import name_path


class Replies:
    def __init__(self, gateway: Gateway, surroundings: Surroundings) -> None:
        self._gateway = gateway
        self._surroundings = surroundings

    def tell(self, connection: ClientConnection, request: Request, request_id: bytes, payload: object) -> None:
        """An answer of the gateway's own."""
        keep_alive = request.keep_alive and not self._gateway.draining
        more, with_body = request.answer_fields, request.method != b"HEAD"
        answer = build_json(200, payload, request_id, keep_alive=keep_alive, more=more, with_body=with_body)
        self.record(request.path, 200, request_id, None, len(answer))
        self._reply(connection, answer, keep_alive=keep_alive)

    def refuse(self, connection: ClientConnection, request: Request, request_id: bytes, error: RequestError) -> None:
        keep_alive = request.keep_alive and not self._gateway.draining
        more, with_body = request.answer_fields, request.method != b"HEAD"
        answer = build_error(error, request_id, keep_alive=keep_alive, more=more, with_body=with_body)
        self.record(request.path, error.status, request_id, error.code or error.kind, len(answer))
        self._reply(connection, answer, keep_alive=keep_alive)

    def _reply(self, connection: ClientConnection, answer: bytes, *, keep_alive: bool) -> None:
        connection.exchange = None
        connection.write(answer)
        if len(answer) > FREE_BYTES:
            connection.account()
        connection.finish(keep_alive=keep_alive)

    def answer_preflight(
        self, connection: ClientConnection, request: Request, request_id: bytes, cors: CORSPolicy
    ) -> None:
        keep_alive = request.keep_alive and not self._gateway.draining
        answer = build_empty(request_id, cors.answer_preflight(request), keep_alive=keep_alive)
        self.record(request.path, 204, request_id, None, len(answer))
        connection.write(answer)
        connection.finish(keep_alive=keep_alive)

    def answer(self, request: Request) -> object:
        """What the gateway knows by itself."""
        own = request.path in OWN_PATHS
        if not own and request.path != MODELS and not request.path.startswith(f"{MODELS}/"):
            raise NotRouted(f"unknown path {request.path[:200]!r}", code="unknown_url")
        if request.method not in (b"GET", b"HEAD"):
            raise NotRouted.wrong_method(request.method, request.path, "GET, HEAD")
        if own:
            return answer_own(
                request.path,
                self._gateway.scheduler,
                in_flight=len(self._gateway.exchanges),
                draining=self._gateway.draining,
                wakes=self._gateway.queue.settings.wakes,
            )
        if request.path == MODELS:
            return {"object": "list", "data": [self._describe(self._gateway.served_names[0])]}
        name = unquote(request.path[len(MODELS) + 1 :])  # clients write the slash of a name as %2F
        check_name(name, self._gateway.served_names)
        return self._describe(name)

    def _describe(self, name: str) -> dict[str, object]:
        told = self._surroundings.describe_model()
        return {"id": name, "object": "model", "created": int(self._gateway.started_at), "owned_by": "tandem", **told}

    def record(self, path: str, status: int, request_id: bytes, error: str | None, size: int) -> None:
        """An answer of the gateway's own."""
        path = name_path(path)
        self._gateway.metrics.count(path, status)
        if self._gateway.access_log is not None:
            self._gateway.access_log.add_own(path, status, request_id, error, size)
