"""The sampling and output options that chat completions and completions share, parsed and checked. Pure.

What `docs/api.md` lists as accepted without effect is taken here and dropped; what it lists as refused is refused
here with a sentence.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from tandem_worker.engine.errors import RequestError
from tandem_worker.engine.schedule.params import GrammarFactory, SamplingParams
from tandem_worker.server.dialects.fields import Fields, check_integer, check_number, check_text, refuse, wrong_type

MAX_CHOICES = 16
"""Upper limit of `n`."""
_ALL_TOKENS = 2**30
"""More than any vocabulary has; samplers hold `top_k` in 32 bits."""
MAX_STOPS = 4
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKENS = 64
MAX_LOGIT_BIAS = 1024
MAX_BIAS_LENGTH = 64
"""Characters of a text that names a token."""
MAX_PROMPT_LOGPROBS = 20
MAX_BAD_WORDS = 64
MAX_BAD_WORD_LENGTH = 128
STORE_ADVICE = (
    "Who runs the model turns a store of responses on with 'spec.gateway.responseStore' of the InferenceModel "
    "(--response-store of a gateway without Kubernetes)."
)
_MAX_DIGITS = 19
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What a request is answered with where it does not say: stands below every request, as a model brings it. Its own
    values are the API's, which turn everything off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0


API_DEFAULTS = SamplingDefaults()
LIMITS = {"temperature": (0.0, 2.0), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0), "repetition_penalty": (0.01, 10.0)}
"""Lowest and highest value of each, in requests as in a model's settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonOptions:
    """Options of one request, independent of the endpoint. `seed` is always set: drawn when the client gave none."""

    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: dict[int, float]
    text_bias: dict[str, float]
    """Biases whose keys are texts."""
    seed: int
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    min_tokens: int
    ignore_eos: bool
    stream: bool
    include_usage: bool
    return_token_ids: bool
    cache_salt: str
    priority: int
    service_tier: str | None
    """The one there is, when the client named a tier: the answer then does so too."""
    continuous_usage: bool
    """Every chunk tells the usage so far."""
    include_stop: bool
    """The stop string, or the text of the stop token, is part of the answer."""
    show_special: bool
    """The text of special tokens is part of the answer."""
    tokens_as_ids: bool
    """Logprobs name tokens by their ids."""
    allowed_token_ids: tuple[int, ...] | None
    """None: all."""
    bad_words: tuple[str, ...]
    truncate_prompt: int | None
    """The last so many tokens of the prompt are taken; -1: as many as fit."""
    prompt_logprobs: int | None
    """Likeliest tokens that are told for each token of the prompt, which is told itself too; None: nothing is."""
    ignored: tuple[str, ...]
    """Fields that a lenient client's request had in vain."""


def parse_common(fields: Fields, vocab_size: int, defaults: SamplingDefaults = API_DEFAULTS) -> CommonOptions:
    """Take the shared options out of `fields`; `defaults` stand for what is absent or null. Raises RequestError."""
    names_tier = fields.given("service_tier")
    take_metadata(fields)
    stream = fields.boolean("stream")
    seed = fields.integer("seed", minimum=INT64_MIN, maximum=INT64_MAX)
    include_usage, continuous_usage = _stream_options(fields, stream)
    logit_bias, text_bias = _logit_bias(fields, vocab_size)
    # SGLang's name, and vLLM's. A fast tokenizer puts no spaces between special tokens either way.
    untrimmed = fields.boolean("no_stop_trim")
    fields.boolean("spaces_between_special_tokens")
    return CommonOptions(
        n=fields.integer("n", minimum=1, maximum=MAX_CHOICES) or 1,
        temperature=_number(fields, "temperature", defaults.temperature),
        top_p=_number(fields, "top_p", defaults.top_p),
        top_k=_top_k(fields, defaults.top_k),
        min_p=_number(fields, "min_p", defaults.min_p),
        presence_penalty=fields.number("presence_penalty", minimum=-2.0, maximum=2.0) or 0.0,
        frequency_penalty=fields.number("frequency_penalty", minimum=-2.0, maximum=2.0) or 0.0,
        repetition_penalty=_number(fields, "repetition_penalty", defaults.repetition_penalty),
        logit_bias=logit_bias,
        text_bias=text_bias,
        seed=secrets.randbits(63) if seed is None else seed,
        stop=_stops(fields),
        stop_token_ids=_stop_token_ids(fields, vocab_size),
        min_tokens=fields.integer("min_tokens", minimum=0) or 0,
        ignore_eos=fields.boolean("ignore_eos"),
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        return_token_ids=fields.boolean("return_token_ids"),
        cache_salt=fields.string("cache_salt", max_length=256) or "",
        priority=fields.integer("priority", minimum=-1000, maximum=1000) or 0,
        service_tier="default" if names_tier else None,
        include_stop=fields.boolean("include_stop_str_in_output") or untrimmed,
        show_special=not fields.boolean("skip_special_tokens", default=True),
        tokens_as_ids=fields.boolean("return_tokens_as_token_ids"),
        allowed_token_ids=_allowed_token_ids(fields, vocab_size),
        bad_words=_bad_words(fields),
        truncate_prompt=take_truncation(fields),
        prompt_logprobs=_prompt_logprobs(fields, stream),
        ignored=tuple(fields.ignored or ()),
    )


def _prompt_logprobs(fields: Fields, stream: bool) -> int | None:
    value = fields.integer("prompt_logprobs", minimum=0, maximum=MAX_PROMPT_LOGPROBS)
    if value is not None and stream:
        refuse(
            "prompt_logprobs", "'prompt_logprobs' is not told in a stream: leave 'stream' out.", "unsupported_parameter"
        )
    return value


def take_metadata(fields: Fields) -> None:
    """Fields that describe the request to its sender's bookkeeping and change nothing about the answer."""
    for key in ("user", "safety_identifier", "prompt_cache_key", "session_id"):
        fields.string(key, max_length=1024)
    for key, value in (fields.raw_object("metadata") or {}).items():
        if not isinstance(value, str):
            wrong_type(f"metadata.{key}", "a string", value)
    fields.unsupported(
        "store",
        f"This server stores no answers: leave 'store' out or false. {STORE_ADVICE}",
        harmless=[False],
        ignorable=True,
    )
    fields.unsupported(
        "service_tier",
        "This server has one service tier: leave 'service_tier' out or 'auto'.",
        harmless=["auto", "default"],
        ignorable=True,
    )


def take_truncation(fields: Fields) -> int | None:
    """`truncate_prompt_tokens`: a number of tokens, or -1; None when absent."""
    value = fields.integer("truncate_prompt_tokens", minimum=-1)
    if value == 0:
        refuse("truncate_prompt_tokens", "'truncate_prompt_tokens' of 0 leaves no prompt: give 1 or more, or -1.")
    return value


def to_sampling(
    options: CommonOptions,
    *,
    logit_bias: dict[int, float],
    max_tokens: int,
    num_logprobs: int | None,
    eos_token_ids: frozenset[int],
    grammar: GrammarFactory | None,
) -> SamplingParams:
    """What the engine is asked for. End-of-sequence tokens are stop tokens unless they are to be ignored."""
    if options.min_tokens > max_tokens:
        raise RequestError(
            f"'min_tokens' ({options.min_tokens}) exceeds the allowed output of {max_tokens} tokens.",
            param="min_tokens",
            code="invalid_value",
        )
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=options.min_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        repetition_penalty=options.repetition_penalty,
        logit_bias=logit_bias,
        seed=options.seed,
        num_logprobs=num_logprobs,
        stop_token_ids=options.stop_token_ids | (frozenset() if options.ignore_eos else eos_token_ids),
        ignore_eos=options.ignore_eos,
        grammar=grammar,
    )


def _number(fields: Fields, key: str, default: float) -> float:
    lowest, highest = LIMITS[key]
    value = fields.number(key, minimum=lowest, maximum=highest)
    return default if value is None else value


def _top_k(fields: Fields, default: int) -> int:
    value = fields.integer("top_k", minimum=-1)
    return default if value is None else 0 if value == -1 else min(value, _ALL_TOKENS)


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.take("stop")
    if value is None:
        return ()
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        wrong_type("stop", "a string or an array of strings", value)
    if len(value) > MAX_STOPS:
        sentence = f"Invalid 'stop': at most {MAX_STOPS} sequences, but there are {len(value)}."
        refuse("stop", sentence, "array_above_max_length")
    return tuple(check_text(item, f"stop[{index}]", MAX_STOP_LENGTH) for index, item in enumerate(value))


def _stop_token_ids(fields: Fields, vocab_size: int) -> frozenset[int]:
    value = fields.array("stop_token_ids") or []
    if len(value) > MAX_STOP_TOKENS:
        refuse("stop_token_ids", f"At most {MAX_STOP_TOKENS} stop tokens are supported.", "array_above_max_length")
    return frozenset(
        check_integer(item, f"stop_token_ids[{index}]", 0, vocab_size - 1) for index, item in enumerate(value)
    )


def _allowed_token_ids(fields: Fields, vocab_size: int) -> tuple[int, ...] | None:
    value = fields.array("allowed_token_ids")
    if value is None:
        return None
    if not value:
        refuse("allowed_token_ids", "'allowed_token_ids' must not be empty.", "empty_array")
    # Each once: a body holds many times as many numbers as a vocabulary has tokens.
    return tuple(
        dict.fromkeys(
            check_integer(item, f"allowed_token_ids[{index}]", 0, vocab_size - 1) for index, item in enumerate(value)
        )
    )


def _bad_words(fields: Fields) -> tuple[str, ...]:
    value = fields.take("bad_words") or []
    if not isinstance(value, list):
        wrong_type("bad_words", "an array of strings", value)
    if len(value) > MAX_BAD_WORDS:
        refuse("bad_words", f"At most {MAX_BAD_WORDS} words are supported.", "array_above_max_length")
    return tuple(
        check_text(item, f"bad_words[{index}]", MAX_BAD_WORD_LENGTH, blank=" ") for index, item in enumerate(value)
    )


def _logit_bias(fields: Fields, vocab_size: int) -> tuple[dict[int, float], dict[str, float]]:
    """Biases by token id, and those that are named by a text."""
    value = fields.raw_object("logit_bias") or {}
    if len(value) > MAX_LOGIT_BIAS:
        refuse("logit_bias", f"At most {MAX_LOGIT_BIAS} biases are supported.", "object_above_max_properties")
    biases: dict[int, float] = {}
    texts: dict[str, float] = {}
    for key, bias in value.items():
        path = f"logit_bias.{key[:MAX_BIAS_LENGTH]}"
        amount = check_number(bias, path, -100.0, 100.0)
        if key.isascii() and key.isdigit() and len(key) <= _MAX_DIGITS and str(int(key)) == key:
            biases[check_integer(int(key), path, 0, vocab_size - 1)] = amount
        elif not key or len(key) > MAX_BIAS_LENGTH or key.lstrip("+-").isdigit():
            # Whoever writes "01" or "-1" means an id, and "²" is a digit to Python too.
            sentence = f"Invalid key '{key[:80]}' in 'logit_bias': keys are token ids, which /tokenize tells."
            refuse("logit_bias", sentence, "invalid_value")
        else:
            texts[key] = amount
    return biases, texts


def _stream_options(fields: Fields, stream: bool) -> tuple[bool, bool]:
    """Whether the usage is told at the end, and whether in every chunk."""
    options = fields.object("stream_options")
    if options is None:
        return False, False
    if not stream:
        refuse("stream_options", "The 'stream_options' parameter is only allowed when 'stream' is true.")
    include_usage = options.boolean("include_usage")
    # Padding against traffic analysis is the concern of whoever ends TLS; it changes no content.
    options.boolean("include_obfuscation")
    # As with vLLM it says how the usage is told, and 'include_usage' whether.
    continuous = options.boolean("continuous_usage_stats") and include_usage
    options.finish()
    return include_usage, continuous
