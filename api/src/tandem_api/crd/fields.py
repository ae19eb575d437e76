"""Texts and numbers that several parts of the spec are made of, and the patterns they follow."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from tandem_api.names import GROUP
from tandem_api.quantities import DURATION_PATTERN, QUANTITY_PATTERN
from tandem_api.validation import Lacks, Matches, Satisfies, rule

MODEL_NAME_MAX = 40
"""Child names append a role, an ordinal and a controller hash, and Pod labels end at 63 characters."""
RANKS_PER_POD_MAX = 64
"""Each rank listens at a KV port of its own, counted up from the first one."""

HUB_URI = r"hf://[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9_.-]+"
CLAIM_URI = r"pvc://[a-z0-9]([a-z0-9-]*[a-z0-9])?/[^ \t\r\n]*"
FILE_URI = r"file:///[^ \t\r\n]+"
PARENT_SEGMENT = r"/(\.|%2[eE]){2}(/|%2[fF]|$)"
"""`..` between slashes, each character perhaps as its code."""

ModelURI = Annotated[
    str,
    Matches(
        f"{HUB_URI}|{CLAIM_URI}|{FILE_URI}",
        "must be hf://ORGANIZATION/REPOSITORY, pvc://CLAIM/PATH or file:///PATH, without spaces",
    ),
    Lacks(PARENT_SEGMENT, "must not have `..` in its path: write the path from the root, or from the claim's"),
    Field(max_length=1024),
]
Revision = Annotated[
    str,
    Matches(r"[A-Za-z0-9][A-Za-z0-9_./-]*", "must be a branch, a tag or a commit, for example main"),
    Field(max_length=128),
]
Quantity = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) is int else value),
    Matches(
        QUANTITY_PATTERN,
        "must be a Kubernetes quantity: a number and an optional suffix, for example 500m or 16Gi",
        int_or_string=True,
    ),
    Field(max_length=32),
]
Share = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) is int else value),
    Matches(
        "0|[1-9][0-9]{0,2}|1000|(0|[1-9][0-9]?|100)%",
        "must be a number of replicas up to 1000, or a percentage of them up to 100%, for example 2 or 25%",
        int_or_string=True,
    ),
]
"""Some of a role's replicas."""


def is_none(share: str | None) -> bool:
    """Whether a share is none, however many replicas there are."""
    return share in ("0", "0%")


def count_share(share: str, replicas: int, *, up: bool) -> int:
    """How many of so many replicas a share is. Percentages are rounded up or down, as those of Deployments are."""
    if not share.endswith("%"):
        return int(share)
    exact = int(share[:-1]) * replicas
    return -(-exact // 100) if up else exact // 100


def is_some(field: str) -> str:
    """A CEL expression: the share in this field is not none."""
    return f"!string({field}).matches('^0%?$')"


Duration = Annotated[
    str,
    Matches(DURATION_PATTERN, "must be a duration in hours, minutes and seconds, for example 30s or 1h30m"),
    Field(max_length=16),
]
ClientTimeout = Annotated[
    Duration,
    Satisfies("!self.matches('^([0-9]+[hms])+$') || duration(self) >= duration('1s')", "must be at least 1s"),
]
ObjectName = Annotated[
    str,
    Matches(
        r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?",
        "must be the name of an object in this namespace: lower-case letters, digits, '-' and '.'",
    ),
    Field(max_length=253),
]
Image = Annotated[
    str,
    Matches(
        r"[A-Za-z0-9][A-Za-z0-9_.:/@-]*",
        "must be a container image, for example ghcr.io/tandem-dev/tandem-worker:0.1.0",
    ),
    Field(max_length=512),
]
PreserveUnknown = Annotated[dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})]
LabelKey = Annotated[str, Field(min_length=1, max_length=317)]
"""A domain and a name."""
PartName = Annotated[
    str,
    Matches(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", "must be lower-case letters, digits and '-', for example gpus"),
    Field(max_length=63),
]
"""The name of something inside an object."""
Hostname = Annotated[
    str,
    Matches(
        r"([*][.])?[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*",
        "must be a host name in lower case, for example llm.example.com or *.example.com",
    ),
    Field(max_length=253),
]
Selector = Annotated[dict[str, Annotated[str, Field(max_length=63)]], Field(max_length=32)]
"""Labels and their values."""
Annotations = Annotated[dict[str, Annotated[str, Field(max_length=4096)]], Field(max_length=32)]
_RESERVED = (f"{GROUP}/", "app.kubernetes.io/")
_NOT_RESERVED = " && ".join(f"!k.startsWith('{prefix}')" for prefix in _RESERVED)


def unreserved(field: str) -> Any:
    """A rule that a map of labels or annotations has none of the operator's."""
    message = f"must not hold names of {' or '.join(_RESERVED)}, which the operator writes: use a domain of your own"
    expression = f"!has(self.{field}) || self.{field}.all(k, {_NOT_RESERVED})"
    return rule(expression, message, path=f".{field}", server_only=True)
