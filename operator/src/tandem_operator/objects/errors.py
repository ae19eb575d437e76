"""Errors of the operator.

OperatorError
├── ModelError             the InferenceModel cannot be served as written: ends in Stalled, waits for a person
│   ├── InvalidSpecError   the schema admits a value that this release cannot read
│   └── InvalidOverlayError  a podTemplate does not fit a pod template
├── APIError               the API server answered with an error status
│   ├── NotFoundError      404
│   ├── ConflictError      409: someone else was faster; the next attempt sees their version
│   ├── RejectedError      400, 422 or a schema error: this object will never be accepted as it is
│   ├── ForbiddenError     403: missing permission, quota or policy
│   │   └── NamespaceEndingError  nothing can be made in a namespace that is being deleted
│   └── ExpiredError       410: a watch has to start over from a list
├── IncompleteError        a look at a model did what it could and has told so in its status: it is tried again
├── UnreadableRevisionError  a revision that was kept cannot be read: waits for a person
├── UnreadableKeysError    the Secret with a model's keys does not hold key rings: waits for a person
└── SettingsError          the operator's own arguments make no sense
"""

from __future__ import annotations


class OperatorError(Exception):
    """Base of all errors raised here on purpose."""


class SettingsError(OperatorError):
    """The operator was started with arguments that make no sense."""


class ModelError(OperatorError):
    """The InferenceModel cannot be served as written. `reason` is one CamelCase word, the text one sentence."""

    reason = "InvalidModel"


class InvalidSpecError(ModelError):
    reason = "InvalidSpec"


class InvalidOverlayError(ModelError):
    reason = "InvalidPodTemplate"


class IncompleteError(OperatorError):
    """Something failed that time may heal. The rest was done and the status is written."""


class UnreadableRevisionError(OperatorError):
    """This release cannot read what an earlier one kept. The sentence names the revision."""


class UnreadableKeysError(OperatorError):
    """The Secret with a model's keys does not hold key rings. The sentence has no part of its content."""


class APIError(OperatorError):
    """The API server answered with an error status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class NotFoundError(APIError):
    pass


class ConflictError(APIError):
    pass


class RejectedError(APIError):
    pass


class ForbiddenError(APIError):
    pass


class NamespaceEndingError(ForbiddenError):
    pass


class ExpiredError(APIError):
    pass


def api_error(status: int, message: str) -> APIError:
    """The error class that an HTTP status and message stand for."""
    if status == 500 and "failed to create typed patch object" in message:
        return RejectedError(status, message)  # server-side apply answers so to a field that does not exist
    if status == 403 and "because it is being terminated" in message:
        return NamespaceEndingError(status, message)
    if status == 422 and "metadata.uid: " in message and "field is immutable" in message:
        return ConflictError(status, message)  # so it answers to an apply that means another object of that name
    classes: dict[int, type[APIError]] = {
        400: RejectedError, 403: ForbiddenError, 404: NotFoundError, 409: ConflictError, 410: ExpiredError,
        422: RejectedError,
    }  # fmt: skip
    return classes.get(status, APIError)(status, message)
