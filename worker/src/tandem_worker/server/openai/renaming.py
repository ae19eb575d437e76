"""What other APIs' requests share that are translated into chats: the extensions, which all of them call the same, and
errors of the chat that name the fields of the request it comes from. Pure.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence

from tandem_worker.engine.errors import RequestError

EXTENSIONS = (
    "seed", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens",
    "ignore_eos", "stop_token_ids", "cache_salt", "priority", "chat_template_kwargs",
)  # fmt: skip
Renaming = Sequence[tuple[re.Pattern[str], str]]
"""Patterns of paths, and what stands there instead."""


@contextlib.contextmanager
def renamed_errors(renaming: Renaming) -> Iterator[None]:
    """A RequestError that leaves this has the path that `renaming` gives it, in its message too."""
    try:
        yield
    except RequestError as error:
        param = error.param or ""
        for pattern, replacement in renaming:
            param = pattern.sub(replacement, param)
        if param == (error.param or ""):
            raise
        message = str(error).replace(f"'{error.param}'", f"'{param}'")
        raise RequestError(message, param=param, code=error.code, status=error.status) from error
