"""What the engine refuses, and how it ends."""

from __future__ import annotations

from tandem_worker.host.errors import WorkerError


class RequestError(WorkerError):
    """The request is wrong. `param` names the field of the OpenAI request, `code` is OpenAI's machine-readable code."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class ContextLengthError(RequestError):
    """Prompt plus requested output do not fit; the message has both lengths."""

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class EngineStoppedError(WorkerError):
    """The engine takes no requests any more."""


class GroupLostError(WorkerError):
    """A process of the group is gone, so that this one must end too; the message says which and why."""
