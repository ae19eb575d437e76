"""The functions of a request: what a model may call, and whether it must. Plain data.

Loads nothing heavy: processes that prepare requests import it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    name: str
    parameters: dict[str, Any]
    """JSON schema of the arguments."""
    strict: bool
    definition: dict[str, Any]
    """As the client sent it: chat templates print it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOptions:
    """`mode` is `none` when there are no tools. A named function is `required` with `callable_tools` narrowed to it."""

    mode: Literal["none", "auto", "required"] = "none"
    tools: tuple[Tool, ...] = ()
    callable_tools: tuple[Tool, ...] = ()
    """Those that `tool_choice` leaves; all of `tools` stand in the prompt."""
    parallel: bool = True

    @property
    def narrowed(self) -> bool:
        """The prompt shows functions that must not be called."""
        return len(self.callable_tools) < len(self.tools)
