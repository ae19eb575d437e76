"""Harmony, the format of gpt-oss: an answer is a chain of messages, each for somebody, each in a channel.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.NAME
    <|constrain|>json<|message|>{...}<|call|>        or        <|channel|>final<|message|>...<|return|>

The analysis channel is reasoning, messages to functions are tool calls, everything else is content. A call ends the
answer, for `<|call|>` is an end token.
"""

from __future__ import annotations

import re
from enum import Enum, auto

from tandem_worker.server.text.output import Parsed, ToolDelta
from tandem_worker.server.text.stops import cut_at_mark
from tandem_worker.server.tools.stepping import SteppingParser

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
ROLE = "assistant"

_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_HEADER_BEGINNINGS = (START, CHANNEL, MESSAGE, "to=")


class _Kind(Enum):
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()


def read_opening(prompt: str) -> str:
    """The part of the prompt that the answer continues: a header, or a message that is to be continued."""
    return prompt.rpartition(START)[2] if START in prompt else ""


class HarmonyParser(SteppingParser):
    """`calls` tells whether the client knows functions; without them a message to one is content.

    Text that has no header, as models write that were trained otherwise, is content.
    """

    def __init__(self, *, calls: bool, parallel: bool = True) -> None:
        super().__init__(parallel=parallel)
        self._calls = calls
        self._kind: _Kind | None = None  # of the message that is being read; None: its header is
        self._said: set[_Kind] = set()
        self._begun = False  # the message has had text

    @property
    def reasoning(self) -> bool:
        return self._kind is _Kind.REASONING

    def flush(self) -> Parsed:
        out = Parsed()
        if not self.complete:
            rest, _ = _split_role(self._buffer)
            if self._kind is not None:
                self._tell(out, self._buffer)
            elif rest.strip() and not rest.lstrip().startswith(_HEADER_BEGINNINGS):
                self._kind = _Kind.CONTENT
                self._tell(out, rest)
        self._buffer = ""
        return out

    def _step(self, out: Parsed) -> bool:
        if self._kind is None:
            return self._read_header(out)
        before, mark, self._buffer = cut_at_mark(self._buffer, (END, CALL, RETURN, START, CHANNEL))
        self._tell(out, before)
        if mark is None:
            return False
        if self._kind is _Kind.CALL:
            if not self._begun:
                self._tell(out, "{}")
            self.complete = not self._parallel
        self._kind = None
        if mark in (START, CHANNEL):  # the message was not closed
            self._buffer = mark + self._buffer
        return True

    def _read_header(self, out: Parsed) -> bool:
        rest, has_role = _split_role(self._buffer)
        begun = rest.lstrip()
        if begun.startswith(_HEADER_BEGINNINGS):
            if MESSAGE not in self._buffer:
                return False
            header, _, self._buffer = self._buffer.partition(MESSAGE)
            self._begin(header.rpartition(START)[2], out)
            return True
        beginnings = _HEADER_BEGINNINGS if has_role else (*_HEADER_BEGINNINGS, ROLE)
        if any(beginning.startswith(begun) for beginning in beginnings):
            return False
        self._kind, self._begun, self._buffer = _Kind.CONTENT, False, rest
        return True

    def _begin(self, header: str, out: Parsed) -> None:
        recipient = _RECIPIENT.search(header)
        channel = _CHANNEL_NAME.search(header)
        name = recipient[1] if recipient is not None else ""
        self._begun = False
        if name.startswith("functions."):
            self._kind = _Kind.CALL if self._calls else _Kind.CONTENT
        elif name or (channel is not None and channel[1] == "analysis"):
            self._kind = _Kind.REASONING  # what goes to a tool of the model's own is not for the client
        else:
            self._kind = _Kind.CONTENT
        if self._kind is _Kind.CALL:
            out.tools.append(self._numbers.begin(name.removeprefix("functions.")))

    def _tell(self, out: Parsed, text: str) -> None:
        kind = self._kind
        if not text or kind is None:
            return
        if kind is not _Kind.CALL and not self._begun and kind in self._said:
            text = "\n\n" + text
        self._begun = True
        self._said.add(kind)
        match kind:
            case _Kind.REASONING:
                out.reasoning += text
            case _Kind.CONTENT:
                out.content += text
            case _Kind.CALL:
                out.tools.append(ToolDelta(self._numbers.index, text))


def _split_role(text: str) -> tuple[str, bool]:
    """`text` behind the role that stands before a header, and whether there is one."""
    named = text.lstrip().removeprefix(START)
    return (named[len(ROLE) :], True) if named.startswith(ROLE) else (text, False)
