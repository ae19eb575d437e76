"""Errors of the worker.

WorkerError
├── RequestError           the client's request cannot be served as it is (HTTP 4xx)
│   └── ContextLengthError prompt plus output exceed what the model or the block space holds
├── StartupError           the worker cannot start; reason and message end in the pod's termination message
├── GroupLostError         a process of this worker's group is gone: nothing can be computed any more
├── TransferError          a KV transfer failed; the request falls back to local prefill
│   ├── IntegrityError     what arrived is not what was sent or ordered
│   └── QuotaError         a peer wants more than a peer may
├── AuthenticationError    a peer does not have a key of this model, or does not believe ours
├── GrammarError           a schema or grammar cannot be compiled or followed
├── GrammarUnavailableError nothing can be said about a grammar now
├── ThreadStartError       the system has no thread for what must run beside the rest
└── EngineStoppedError     the engine no longer takes requests (draining or dead)
"""

from __future__ import annotations


class WorkerError(Exception):
    """Root of the errors this package raises."""


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


class StartupError(WorkerError):
    """The worker cannot start. `reason` is CamelCase and ends in a condition of the InferenceModel."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class GroupLostError(WorkerError):
    """A process of the group is gone, so that this one must end too; the message says which and why."""


class TransferError(WorkerError):
    """Blocks could not be moved: the peer is gone, refused, or sent data that fails its checksum."""


class IntegrityError(TransferError):
    """What arrived fails its sum, or is not what was ordered. `kind` is one word for metrics."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class QuotaError(TransferError):
    """A peer asks for more at a time than one peer, or all of them, may have."""


class AuthenticationError(WorkerError):
    """A peer did not prove a key of this model's ring. `reason` is one word for metrics, where there is one."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class GrammarError(WorkerError):
    """A schema or grammar cannot be compiled, or its resource limits were reached; the message says why."""


class GrammarUnavailableError(WorkerError):
    """Nothing can be said about a grammar now, whatever it is; the message says why."""


class ThreadStartError(WorkerError):
    """The system starts no more threads: a limit on processes or memory is reached."""


class EngineStoppedError(WorkerError):
    """The engine takes no requests any more."""
