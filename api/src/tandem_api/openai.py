"""The error shape of the OpenAI API, which gateway and worker share."""

from __future__ import annotations

from typing import Any, Literal

ErrorType = Literal[
    "invalid_request_error", "authentication_error", "permission_error", "not_found_error", "rate_limit_error",
    "server_error", "timeout_error", "overloaded_error",
]  # fmt: skip


def error_body(message: str, *, kind: ErrorType, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error as OpenAI clients parse it: `{"error": {message, type, param, code}}`."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
