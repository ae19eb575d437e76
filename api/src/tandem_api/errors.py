"""Errors of this package.

TandemAPIError
├── SchemaError        a type has no structural form (found when the CRD is generated)
└── CELError           a rule cannot be read, or reads what is not there
"""


class TandemAPIError(Exception):
    """Base of all errors raised here on purpose."""


class SchemaError(TandemAPIError):
    """A type cannot be said as a structural schema."""


class CELError(TandemAPIError, ValueError):
    """A rule is not of the part of CEL that is known here, or does not fit the object that it is asked about. A
    ValueError, so that of an object that it comes from pydantic says so, as the API server does: it is refused."""
