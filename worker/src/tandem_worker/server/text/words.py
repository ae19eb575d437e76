"""Options that name tokens by their text."""

from __future__ import annotations

from tandem_worker.server.dialects.fields import refuse
from tandem_worker.server.dialects.openai.options import CommonOptions
from tandem_worker.server.prepare.served_model import ServedModel
from tandem_worker.server.structured.bad_words import BadWords

_MAX_QUOTED = 8


def resolve_bias(options: CommonOptions, model: ServedModel) -> dict[int, float]:
    """`logit_bias` by token id. Raises RequestError for a text that is not one token."""
    named = {text: _encode(model, text) for text in options.text_bias}
    wrong = [text for text, tokens in named.items() if len(tokens) != 1 or _decode(model, tokens) != text]
    if wrong:
        keys = ", ".join(f"'{text}'" for text in wrong[:_MAX_QUOTED])
        refuse(
            "logit_bias",
            f"Not the text of one token each: {keys}. Keys of 'logit_bias' are token ids, which /tokenize tells, or "
            "the text of one token.",
            "invalid_value",
        )
    return options.logit_bias | {tokens[0]: options.text_bias[text] for text, tokens in named.items()}


def bad_words(options: CommonOptions, model: ServedModel) -> BadWords | None:
    """What keeps them out of an answer: each as it stands, and after a space."""
    if not options.bad_words:
        return None
    sequences = {
        tuple(_encode(model, spelled)) for word in options.bad_words for spelled in (word, f" {word.lstrip(' ')}")
    }
    return BadWords((sequence for sequence in sequences if sequence), model.vocab_size)


def _decode(model: ServedModel, tokens: list[int]) -> str:
    return model.tokenizer.backend_tokenizer.decode(tokens, skip_special_tokens=False)


def _encode(model: ServedModel, text: str) -> list[int]:
    return model.tokenizer.encode(text, add_special_tokens=False)
