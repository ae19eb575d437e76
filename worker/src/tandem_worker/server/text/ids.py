"""Ids of the parts of an answer, as functions of its own: whoever goes on with an answer gives the same ones. Pure."""

from __future__ import annotations

import hashlib


def derive_id(prefix: str, answer_id: str, part: str, *, size: int) -> str:
    """`prefix` and `size` bytes in hexadecimal. As hard to guess as the id of the answer; equal for equal arguments."""
    return prefix + hashlib.blake2b(f"{answer_id} {part}".encode(), digest_size=size).hexdigest()
