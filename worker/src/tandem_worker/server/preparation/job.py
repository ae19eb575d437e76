"""Preparing requests in a process of its own: what that process is set up with, and what goes to it and comes back."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tandem_worker.engine.errors import ContextLengthError, RequestError
from tandem_worker.server.preparation.fitting import LengthBound
from tandem_worker.server.preparation.preparing import Prepared, Preparer, PromptRules, reduce
from tandem_worker.server.text.prompting import Prompter

KINDS = (
    "chat", "completion", "responses", "messages", "count", "embedding", "score", "rerank", "tokenize", "detokenize"
)  # fmt: skip
SETUP = f"{__name__}:setup"

_MESSAGE_CHARACTERS = 4096
"""The most of a refusal that is kept: it may quote the request."""
_WARM_UP = b'{"model":"","messages":[{"role":"user","content":"x"}]}'


def pack_setup(tokenizer: Any, rules: PromptRules, bound: LengthBound | None) -> bytes:
    """The payload for `setup`. Raises what pickle raises for a tokenizer that it cannot write."""
    return pickle.dumps((tokenizer, rules, bound))


def setup(payload: bytes) -> Mapping[str, Callable[[bytes], bytes]]:
    """In the isolated process, once: the functions that jobs are forked to run, by kind of request."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    # transformers does without; it would take longer to load, and more memory, than all else here.
    sys.modules["torch"] = None  # type: ignore[assignment]
    tokenizer, rules, bound = pickle.loads(payload)
    preparer = Preparer(Prompter(tokenizer, rules.tools), rules, bound)
    with contextlib.suppress(RequestError):  # the template is compiled on its first use, and jobs begin with that done
        preparer.prepare("chat", _WARM_UP.replace(b'""', b'"%b"' % rules.name.encode(), 1))
    return {
        job_name(kind, lenient=lenient): partial(_run, preparer, kind, lenient=lenient)
        for kind in KINDS
        for lenient in (False, True)
    }


def job_name(kind: str, *, lenient: bool) -> str:
    """What a job is called that prepares this kind of request."""
    return f"{kind} lenient" if lenient else kind


def _run(preparer: Preparer, kind: str, body: bytes, *, lenient: bool = False) -> bytes:
    gc.disable()  # millions of objects take seconds to look through; what cycles hold goes with the job's process
    try:
        return pickle.dumps(reduce(preparer.prepare(kind, body, lenient=lenient)))
    except RequestError as error:
        least = isinstance(error, ContextLengthError)
        return pickle.dumps((least, str(error)[:_MESSAGE_CHARACTERS], error.param, error.code, error.status))


def unpack(answer: bytes) -> Prepared:
    """Raises RequestError. What comes back is small but for the tokens, which take no time to read."""
    value: Any = pickle.loads(answer)
    if not isinstance(value, tuple):
        return value
    too_long, message, param, code, status = value
    if too_long:
        raise ContextLengthError(message, param=param)
    raise RequestError(message, param=param, code=code, status=status)
