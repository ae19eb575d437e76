"""What the API server's refusals mean to a person: the object, the server's words, and what to do. Pure."""

from __future__ import annotations

import re

from tandem_operator.objects.errors import APIError, ConflictError, ForbiddenError, RejectedError
from tandem_operator.objects.manifests import HTTP_ROUTE
from tandem_operator.objects.problem import Problem

_MESSAGE_MAX = 500
_WEBHOOK = re.compile(r'(?:admission|calling) webhook "([^"]+)"')
_POLICY = re.compile(r"ValidatingAdmissionPolicy '([^']+)'")
_MISSING_RIGHT = re.compile(r"cannot (\w+) resource")


def refusal(child: str, error: Exception, *, doing: str = "write") -> Problem:
    """What to report of a failed request about `child`. Stalled where time alone does not heal it."""
    words = " ".join(str(error).split())[:_MESSAGE_MAX] or type(error).__name__
    if isinstance(error, RejectedError):
        # A webhook may refuse with any status.
        return Problem(reason="Rejected", message=f"{_refused(child, words, doing)}{advice(words)}", stalled=True)
    if isinstance(error, ForbiddenError):
        reason = "QuotaExceeded" if "exceeded quota" in words else "Forbidden"
        return Problem(reason=reason, message=f"{_refused(child, words, doing)}{advice(words)}", stalled=True)
    if isinstance(error, ConflictError):
        return Problem(reason="Conflict", message=f"somebody else writes {child} too: {words}; trying again")
    if isinstance(error, APIError) and _WEBHOOK.search(words) is not None and error.status >= 500:
        return Problem(reason="WebhookFailed", message=f"cannot {doing} {child}: {words}; trying again{advice(words)}")
    reason = "APIError" if isinstance(error, APIError) else "APIServerUnreachable"
    return Problem(reason=reason, message=f"cannot {doing} {child}: {words}; trying again")


def unserved_problem(kind: str) -> Problem:
    """What to report of a child whose kind the API server does not have. The gateway's route is the only one."""
    text = (
        f"spec.gateway.httpRoute asks for an {kind}, which this API server does not have: install the CRDs of the"
        f" Gateway API ({HTTP_ROUTE.api_version}), or remove the field"
    )
    return Problem(reason="GatewayAPIMissing", message=text, stalled=True)


def _refused(child: str, words: str, doing: str) -> str:
    what = child if doing == "write" else f"to {doing} {child}"
    return f"the API server refuses {what}: {words}"


def advice(words: str) -> str:
    """What to do about a refusal with these words, to be put after them; empty where nobody can say."""
    if found := _WEBHOOK.search(words) or _POLICY.search(words):
        return f"; ask who runs {found[1]}, or write what it wants"
    if "exceeded quota" in words:
        return "; raise the ResourceQuota, or lower what the model asks for"
    if "violates PodSecurity" in words:
        return "; take that out of the podTemplate, or let the namespace have it (pod-security.kubernetes.io/enforce)"
    if found := _MISSING_RIGHT.search(words):
        return f"; give the operator the right to {found[1]} it: upgrade its chart"
    return ""
