"""What can go wrong in the gateway, and what the client is told.

GatewayError
├── ConfigError            the process cannot start with these settings
├── DiscoveryError         the API server answered something unusable; the last known workers stay
└── RequestError           ends one request with an OpenAI error
    ├── BadRequest         400 and its siblings: the client must change the request
    ├── UnknownModel       404 model_not_found
    ├── UnknownResponse    404: no response of this id is kept for who asks
    ├── NotRouted          404 or 405: no such path or method
    ├── NoEndpoint         503: no worker of a role is there
    ├── QueueFull          503: nor is there, and as many requests wait for one as may
    │   └── WorkerFull     429: as many wait at the worker as may, and most of them are of who asks
    ├── UpstreamFailed     502: workers failed and the retries are used up, or a stream broke
    ├── UpstreamTimeout    504: a worker was silent for too long
    ├── ShuttingDown       503: this gateway is going away
    └── GatewayFull        503: this gateway has no room for one more
"""

from __future__ import annotations

from math import ceil
from typing import Any

from tandem_api.openai import ErrorType, error_body

USUAL_SECONDS = 5.0
"""To come back after, where nothing tells how long what waits will take."""
_LONGEST_SECONDS = 60.0


def retry_after(seconds: float | None = None) -> tuple[tuple[str, str], ...]:
    """The header field that says when to come back: in whole seconds, at least one. None: nobody knows."""
    seconds = min(_LONGEST_SECONDS, max(1.0, ceil(USUAL_SECONDS if seconds is None else seconds)))
    return (("Retry-After", f"{seconds:.0f}"),)


class GatewayError(Exception):
    """Base of everything this part raises on purpose."""


class ConfigError(GatewayError):
    """The settings contradict each other or cannot be read."""


class DiscoveryError(GatewayError):
    """The API server's answer cannot be used. `gone` means that the resource version is too old: list again."""

    def __init__(self, message: str, *, gone: bool = False) -> None:
        super().__init__(message)
        self.gone = gone


class RequestError(GatewayError):
    """Ends one request. `status` and the rest become an OpenAI error; `headers` are added to the response."""

    status = 500
    kind: ErrorType = "server_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status or self.status
        self.param = param
        self.code = code or self.code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        return error_body(self.message, kind=self.kind, param=self.param, code=self.code)


class BadRequest(RequestError):
    status = 400
    kind: ErrorType = "invalid_request_error"


class UnknownModel(RequestError):
    status = 404
    kind: ErrorType = "invalid_request_error"
    code = "model_not_found"


class UnknownResponse(RequestError):
    """In the same words whether there is none or it is somebody else's."""

    status = 404
    kind: ErrorType = "invalid_request_error"
    code = "response_not_found"

    def __init__(self, name: str, *, param: str | None = None) -> None:
        super().__init__(
            f"Response with id {name[:100]!r} not found: it was not stored, has been deleted, or may have expired, "
            "made room for others or gone with a restart of the gateway; send the whole conversation in 'input'",
            param=param,
            code="previous_response_not_found" if param else None,
        )


class NotRouted(RequestError):
    status = 404
    kind: ErrorType = "invalid_request_error"

    @classmethod
    def wrong_method(cls, method: bytes, path: str, allowed: str) -> NotRouted:
        """405. `allowed`: the methods that there are, joined by commas."""
        return cls(
            f"{path} does not accept {method.decode('latin-1')}; use {allowed}",
            status=405,
            code="method_not_allowed",
            headers=(("Allow", allowed),),
        )


class NoEndpoint(RequestError):
    status = 503
    kind: ErrorType = "overloaded_error"
    code = "no_endpoint"

    def __init__(self, message: str, seconds: float | None = None) -> None:
        """`seconds` that what waits will take, where that is known."""
        super().__init__(message, headers=retry_after(seconds))


class QueueFull(NoEndpoint):
    code = "queue_full"


class WorkerFull(QueueFull):
    status = 429
    kind: ErrorType = "rate_limit_error"


class UpstreamFailed(RequestError):
    status = 502
    kind: ErrorType = "server_error"
    code = "upstream_failed"


class UpstreamTimeout(RequestError):
    status = 504
    kind: ErrorType = "timeout_error"
    code = "timeout"


class ShuttingDown(RequestError):
    status = 503
    kind: ErrorType = "overloaded_error"
    code = "shutting_down"

    def __init__(self, message: str) -> None:
        super().__init__(message, headers=retry_after())


class GatewayFull(RequestError):
    """Never a worker's fault: the process has as many connections, bytes or descriptors as it may."""

    status = 503
    kind: ErrorType = "overloaded_error"
    code = "gateway_full"

    def __init__(self, message: str) -> None:
        super().__init__(message, headers=retry_after())
