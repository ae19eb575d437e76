"""In front of the inference API: who does not show a key of the model is told so, and nothing else.

What a request names is not looked at before: a stranger learns no path, no model, no state of this worker. With keys,
what passes comes from a gateway of the model, or from a person with its key, so its headers are believed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send
from tandem_api import names
from tandem_api.keys import KeyRing, admits
from tandem_api.openai import error_body

from tandem_worker.engine.errors import RequestError
from tandem_worker.server.wire.http import MAX_BODY_BYTES, content_length, header, request_id, send_json

_MESSAGE = f"This is not for clients: a worker takes requests that show its model's key in {names.HEADER_TOKEN}."


class TokenGate:
    def __init__(self, app: ASGIApp, ring: Callable[[], KeyRing]) -> None:
        """`ring` gives the keys that are good now, cheaply: it is asked for every request."""
        self._app = app
        self._ring = ring
        self.refusals: Counter[str] = Counter(no_token=0, wrong_token=0)
        """Requests that were not let through. Grows only; read by metrics."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        token = header(scope, names.HEADER_TOKEN)
        if admits(self._ring(), token):
            await self._app(scope, receive, send)
            return
        self.refusals["no_token" if token is None else "wrong_token"] += 1
        headers = {names.HEADER_REQUEST_ID: request_id(scope)}
        if not _ends_soon(scope):
            headers["connection"] = "close"
        body = error_body(_MESSAGE, kind="authentication_error", code="invalid_token")
        await send_json(send, body, status=401, headers=headers)


def _ends_soon(scope: Scope) -> bool:
    """Whether the body, which nobody reads, is small enough to let it pass and keep the connection.

    Closing while a client still sends would reset the connection before the client has read why.
    """
    try:
        length = content_length(scope)
    except RequestError:
        return False
    if length is not None:
        return length <= MAX_BODY_BYTES
    return header(scope, "transfer-encoding") is None
