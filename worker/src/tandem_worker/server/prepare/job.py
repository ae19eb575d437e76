"""Preparing requests in a process of its own: what that process is set up with, and what goes to it and comes back."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import pickle
import sys
from array import array
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import orjson

from tandem_worker.engine.errors import ContextLengthError, RequestError
from tandem_worker.server.dialects.fields import refuse
from tandem_worker.server.dialects.openai.chat_request import ChatRequest
from tandem_worker.server.dialects.openai.output_format import ResponseFormat
from tandem_worker.server.prepare.draft import (
    Prepared,
    PreparedChat,
    PreparedCompletion,
    PreparedEmbedding,
    PreparedScore,
)
from tandem_worker.server.prepare.fitting import LengthBound
from tandem_worker.server.prepare.preparer import NotHereError, Preparer
from tandem_worker.server.prepare.prompting import Prompter
from tandem_worker.server.prepare.rules import PromptRules

KINDS = (
    "chat", "completion", "responses", "messages", "count", "embedding", "score", "rerank", "tokenize", "detokenize"
)  # fmt: skip
SETUP = f"{__name__}:setup"

MAX_DEFINITION_BYTES = 512 * 1024
"""The most that a request's schemas, functions and grammar may take together, as JSON."""
_MESSAGE_CHARACTERS = 4096
"""The most of a refusal that is kept: it may quote the request."""
_NOT_HERE = b""
_WARM_UP = b'{"model":"","messages":[{"role":"user","content":"x"}]}'


def pack_setup(tokenizer: Any, rules: PromptRules, bound: LengthBound | None) -> bytes:
    """The payload for `setup`. Raises what pickle raises for a tokenizer that it cannot write."""
    return pickle.dumps((tokenizer, rules, bound))


def setup(payload: bytes) -> Mapping[str, Callable[[bytes], bytes]]:
    """In the isolated process, once: the functions that jobs are forked to run, by kind of request."""
    tokenizer, rules, bound = pickle.loads(payload)
    prompter = Prompter(tokenizer, rules.tools)
    preparer = Preparer(prompter, rules, bound)
    trusting = Preparer(prompter, rules, bound, apart=True)
    with contextlib.suppress(RequestError):  # the template is compiled on its first use, and jobs begin with that done
        preparer.prepare("chat", _WARM_UP.replace(b'""', b'"%b"' % rules.name.encode(), 1))
    return {
        job_name(kind, lenient=lenient, template=template): partial(
            _run, trusting if template else preparer, kind, lenient=lenient
        )
        for kind in KINDS
        for lenient in (False, True)
        for template in (False, True)
    }


def job_name(kind: str, *, lenient: bool, template: bool = False) -> str:
    """What a job is called that prepares this kind of request. `template`: also one that brings its chat template."""
    return f"{kind}{' lenient' if lenient else ''}{' template' if template else ''}"


def _run(preparer: Preparer, kind: str, body: bytes, *, lenient: bool = False) -> bytes:
    gc.disable()  # millions of objects take seconds to look through; what cycles hold goes with the job's process
    try:
        return pickle.dumps(reduce(preparer.prepare(kind, body, lenient=lenient)))
    except RequestError as error:
        least = isinstance(error, ContextLengthError)
        return pickle.dumps((least, str(error)[:_MESSAGE_CHARACTERS], error.param, error.code, error.status))
    except NotHereError:
        return _NOT_HERE


def reduce(prepared: Prepared) -> Prepared:
    """Without what is used up, so that it takes neither long to send nor much to hold. Raises RequestError."""
    match prepared:
        case PreparedChat():
            _check_definitions(prepared.request)
            tools = prepared.request.tools
            request = dataclasses.replace(
                prepared.request,
                messages=[],
                chat_template=None,
                template_kwargs={},
                tools=dataclasses.replace(
                    tools,
                    tools=tuple(dataclasses.replace(tool, definition={}) for tool in tools.tools),
                    callable_tools=tuple(dataclasses.replace(tool, definition={}) for tool in tools.callable_tools),
                ),
            )
            return dataclasses.replace(
                prepared,
                request=dataclasses.replace(request, prediction=""),
                tokens=array("i", prepared.tokens),
                prediction=array("i", prepared.prediction),
            )
        case PreparedCompletion():
            _check_size({prepared.request.response_format.content_path: _size_of(prepared.request.response_format)})
            # Texts are repeated by `echo` alone.
            request = prepared.request if prepared.request.echo else dataclasses.replace(prepared.request, prompts=())
            return dataclasses.replace(
                prepared,
                request=dataclasses.replace(request, prediction=""),
                tokens=[array("i", each) for each in prepared.tokens],
                prediction=array("i", prepared.prediction),
            )
        case PreparedEmbedding():
            return dataclasses.replace(
                prepared,
                request=dataclasses.replace(prepared.request, inputs=()),
                tokens=[array("i", each) for each in prepared.tokens],
            )
        case PreparedScore():
            return dataclasses.replace(prepared, tokens=[array("i", each) for each in prepared.tokens])
        case bytes():
            return prepared


def _check_definitions(request: ChatRequest) -> None:
    """Schemas and grammars go to the compiler as they are. Raises RequestError."""
    answer = request.response_format
    _check_size(
        {
            "tools": sum(len(orjson.dumps(tool.parameters)) for tool in request.tools.tools),
            answer.content_path.partition(".")[0]: _size_of(answer),
        }
    )


def _size_of(answer: ResponseFormat) -> int:
    return len(answer.definition.encode()) + len(orjson.dumps(answer.schema))


def _check_size(sizes: Mapping[str, int]) -> None:
    """Raises RequestError naming the largest."""
    if sum(sizes.values()) > MAX_DEFINITION_BYTES:
        largest = max(sizes, key=lambda key: sizes[key])
        refuse(
            largest,
            f"The schemas of this request have {sum(sizes.values())} bytes; "
            f"at most {MAX_DEFINITION_BYTES} are supported.",
            "string_above_max_length",
        )


class _PlainUnpickler(pickle.Unpickler):
    """Makes data alone, whatever it reads: a template may have taken over the process that wrote it."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name == "array" and global_name in ("array", "_array_reconstructor"):
            return super().find_class(module_name, global_name)
        if module_name.startswith("tandem_worker.server.") and "." not in global_name:
            found = getattr(sys.modules.get(module_name), global_name, None)
            if isinstance(found, type) and dataclasses.is_dataclass(found) and found.__module__ == module_name:
                return found
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is no part of a prepared request")


def unpack(answer: bytes) -> Prepared:
    """Raises RequestError, NotHereError. What comes back is small but for the tokens, which take no time to read."""
    if answer == _NOT_HERE:
        raise NotHereError
    value: Any = _PlainUnpickler(io.BytesIO(answer)).load()
    if not isinstance(value, tuple):
        return value
    too_long, message, param, code, status = value
    if too_long:
        raise ContextLengthError(message, param=param)
    raise RequestError(message, param=param, code=code, status=status)
