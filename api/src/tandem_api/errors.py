"""Errors of this package.

TandemAPIError
└── SchemaError        a type has no structural form (found when the CRD is generated)
"""


class TandemAPIError(Exception):
    """Base of all errors raised here on purpose."""


class SchemaError(TandemAPIError):
    """A type cannot be said as a structural schema."""
