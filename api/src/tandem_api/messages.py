"""What clients of the Messages API send that is no part of a prompt, and what of it is read in its place.

Claude Code begins its system prompt with a line for its maker's accounts, which differs in each request, and marks
with `cache_control` up to where a prompt is to be cached, which moves from turn to turn. Prompts that differ in these
alone are the same: gateways compare them without, and workers compute them without.
"""

from __future__ import annotations

import re

_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")


def drop_billing_line(text: str) -> str:
    """A block of a system prompt, without the line. Only a first line is one."""
    return _BILLING.sub("", text) if text.startswith("x-anthropic-billing-header:") else text
