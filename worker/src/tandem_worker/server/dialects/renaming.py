"""What other APIs' requests share that are translated into chats: the extensions, which all of them call the same, and
errors of the chat that name the fields of the request it comes from. Pure.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence

from tandem_worker.engine.errors import RequestError

EXTENSIONS = (
    "seed", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens",
    "ignore_eos", "stop_regex", "stop_token_ids", "cache_salt", "priority", "chat_template_kwargs",
)  # fmt: skip
Renaming = Sequence[tuple[re.Pattern[str], str]]
"""Patterns of paths, and what stands there instead."""


Places = Mapping[str, str]
"""Paths of one chat, and where in the request that it comes from they stand. Its messages have others than the
conversation there: some are made of several items, or of a part of one."""


def rename(path: str, renaming: Renaming, places: Places | None = None) -> str:
    """What the request calls that which is `path` in the chat."""
    place = re.match(r"\w+(\[\d+\])?", path)
    if places and place is not None and place[0] in places:
        # The calls of a message have no place of their own there.
        path = places[place[0]] + path[place.end() :].removesuffix(".tool_calls")
    for pattern, replacement in renaming:
        path = pattern.sub(replacement, path)
    return path


@contextlib.contextmanager
def renamed_errors(renaming: Renaming, places: Places | None = None) -> Iterator[None]:
    """A RequestError that leaves this has the path that the request has for it, in its message too."""
    try:
        yield
    except RequestError as error:
        old = error.param or ""
        param = rename(old, renaming, places)
        if param == old:
            raise
        message = str(error).replace(f"'{old}'", f"'{param}'").replace(f": {old}.", f": {param}.")
        field = old.partition(".")[0]
        if "_" in field or "[" in field:  # not a word that a sentence may have
            message = message.replace(field, rename(field, renaming, places))
        raise RequestError(message, param=param, code=error.code, status=error.status) from error
