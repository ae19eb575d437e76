"""Errors of the cluster scripts.

ClusterError             what a person must know and do, in sentences
└── CommandFailed        a program answered with an error; carries the end of what it said
"""

from __future__ import annotations


class ClusterError(Exception):
    """The message stands alone: it says what is wrong and what to do about it."""


class CommandFailed(ClusterError):
    """A program that the scripts rely on failed."""

    def __init__(self, command: list[str], code: int, output: str) -> None:
        self.command, self.code, self.output = command, code, output
        tail = "\n    ".join(output.strip().splitlines()[-12:])
        super().__init__(f"`{' '.join(command[:6])}` ended with {code}:\n    {tail}")
