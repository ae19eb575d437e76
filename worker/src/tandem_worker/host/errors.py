"""The root of the worker's errors, and those that any part may meet. Others stand in their package's `errors`."""

from __future__ import annotations


class WorkerError(Exception):
    """Root of the errors this package raises."""


class StartupError(WorkerError):
    """The worker cannot start. `reason` is CamelCase and ends in a condition of the InferenceModel."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class AuthenticationError(WorkerError):
    """A peer did not prove a key of this model's ring. `reason` is one word for metrics, where there is one."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class ThreadStartError(WorkerError):
    """The system starts no more threads: a limit on processes or memory is reached."""
