"""A (legacy) completion request: the body, checked and typed. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tandem_worker.server.dialects.fields import Fields, check_integer, refuse, wrong_type
from tandem_worker.server.dialects.openai.options import API_DEFAULTS, CommonOptions, SamplingDefaults, parse_common
from tandem_worker.server.dialects.openai.other_servers import refuse_other_servers
from tandem_worker.server.dialects.openai.output_format import TEXT, ResponseFormat, parse_output_format

DEFAULT_MAX_TOKENS = 16
MAX_LOGPROBS = 20
MAX_PROMPTS = 128

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    model: str | None
    """None: whichever is served."""
    prompts: tuple[Prompt, ...]
    common: CommonOptions
    max_tokens: int
    """0 is possible with `echo` alone: the prompt is scored and nothing generated."""
    num_logprobs: int | None
    echo: bool
    response_format: ResponseFormat = TEXT
    add_special_tokens: bool = True
    """Those of the tokenizer, to prompts that are text."""
    prediction: str = ""
    """What the client expects the answers to be."""


def parse_completion(
    body: object, vocab_size: int, *, sampling: SamplingDefaults = API_DEFAULTS, lenient: bool = False
) -> CompletionRequest:
    """Raises RequestError."""
    fields = Fields(body, lenient=lenient)
    model = fields.string("model")
    prompts = parse_prompts(fields.required("prompt"), vocab_size, name="prompt", limit=MAX_PROMPTS)
    echo = fields.boolean("echo")
    max_tokens = fields.integer("max_tokens", minimum=0)
    if max_tokens == 0 and not echo:
        refuse(
            "max_tokens",
            "'max_tokens' of 0 generates nothing; it is only allowed with 'echo'.",
            "integer_below_min_value",
        )
    common = parse_common(fields, vocab_size, sampling)
    best_of = fields.integer("best_of", minimum=1, maximum=20)
    if best_of is not None and best_of != common.n:
        refuse(
            "best_of", "'best_of' is not supported: leave it out, or give the value of 'n'.", "unsupported_parameter"
        )
    fields.unsupported("suffix", "Insertion ('suffix') is not supported by this model.", harmless=[""])
    if echo and common.truncate_prompt is not None:
        refuse("truncate_prompt_tokens", "'truncate_prompt_tokens' and 'echo' exclude each other: leave one out.")
    request = CompletionRequest(
        model=model,
        prompts=prompts,
        common=common,
        max_tokens=DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens,
        num_logprobs=fields.integer("logprobs", minimum=0, maximum=MAX_LOGPROBS),
        echo=echo,
        response_format=parse_output_format(fields),
        add_special_tokens=fields.boolean("add_special_tokens", default=True),
        prediction=fields.string("prediction") or "",
    )
    refuse_other_servers(fields)
    fields.finish()
    return request


def parse_prompts(value: Any, vocab_size: int, *, name: str, limit: int) -> tuple[Prompt, ...]:
    """The four forms: a string, strings, token ids, or lists of token ids. Raises RequestError."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        wrong_type(name, "a string, an array of strings, an array of token ids, or an array of those", value)
    if not value:
        refuse(name, f"'{name}' must not be empty.", "empty_array")
    if isinstance(value[0], int) and not isinstance(value[0], bool):
        return (check_token_ids(value, name, vocab_size),)
    if len(value) > limit:
        refuse(
            name,
            f"'{name}' may be an array of at most {limit} texts, but there are {len(value)}.",
            "array_above_max_length",
        )
    prompts: list[Prompt] = []
    for index, item in enumerate(value):
        path = f"{name}[{index}]"
        if isinstance(item, list):
            prompts.append(check_token_ids(item, path, vocab_size))
        elif isinstance(item, str):
            prompts.append(item)
        else:
            wrong_type(path, "a string or an array of token ids", item)
        if type(prompts[index]) is not type(prompts[0]):
            refuse(path, f"'{name}' must not mix strings and token ids.", "invalid_type")
    return tuple(prompts)


def check_token_ids(value: list[Any], path: str, vocab_size: int) -> tuple[int, ...]:
    """`value` as token ids of the vocabulary. Raises RequestError naming the first item that is none."""
    if not value:
        refuse(path, f"'{path}' must not be empty.", "empty_array")
    # One pass without a call per token: prompts have many thousands of them.
    for index, item in enumerate(value):
        if type(item) is not int or not 0 <= item < vocab_size:
            check_integer(item, f"{path}[{index}]", 0, vocab_size - 1)
    return tuple(value)
