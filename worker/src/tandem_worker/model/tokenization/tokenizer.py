"""A tokenizer: the library's own object, and what its files say beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer as Backend

UNLIMITED = int(1e30)
"""The length that tokenizers without a limit state."""
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that every tokenizer may have; a model may name more of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSettings:
    """What is not part of the library's object."""

    special_tokens: dict[str, str] = field(default_factory=dict[str, str])
    """Texts of special tokens by their names, which templates know them by."""
    extra_special_tokens: tuple[str, ...] = ()
    """Special tokens without a name."""
    chat_template: str | dict[str, str] | None = None
    """Several have names, of which `default` and `tool_use` have a meaning."""
    model_max_length: int = UNLIMITED
    """Tokens that the model takes, as the tokenizer's files say."""
    split_special_tokens: bool = False
    """Special tokens in a text are text like any other."""
    class_name: str = "TokenizersBackend"
    """The class that transformers makes of it."""


class Tokenizer:
    """Immutable but for the backend's own state. Pickles. Any thread, as the backend."""

    def __init__(self, backend: Backend, settings: TokenizerSettings) -> None:
        """`backend` has no truncation and no padding from now on: they would cut long texts in silence."""
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = settings.split_special_tokens
        self.backend_tokenizer = backend
        self.settings = settings

    def __reduce__(self) -> tuple[type[Tokenizer], tuple[Backend, TokenizerSettings]]:
        return Tokenizer, (self.backend_tokenizer, self.settings)  # the backend leaves some of its state behind

    def __len__(self) -> int:
        """Tokens of the vocabulary, added ones included."""
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        """Its source, or sources by name."""
        return self.settings.chat_template

    @property
    def model_max_length(self) -> int:
        """Tokens that the model takes, as the tokenizer's files say; a huge number where they do not."""
        return self.settings.model_max_length

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """Texts of the special tokens that have names, by these."""
        return dict(self.settings.special_tokens)

    @property
    def all_special_tokens(self) -> list[str]:
        """Texts of the special tokens with and without names, each once."""
        return list(dict.fromkeys([*self.settings.special_tokens.values(), *self.settings.extra_special_tokens]))

    @property
    def all_special_ids(self) -> list[int]:
        """Their ids; those that the vocabulary lacks are left out."""
        found = map(self.backend_tokenizer.token_to_id, self.all_special_tokens)
        return [token for token in found if token is not None]

    @property
    def bos_token(self) -> str | None:
        """The text of the token that begins a text."""
        return self.settings.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """The text of the token that ends a text."""
        return self.settings.special_tokens.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        """The text of the token that fills up."""
        return self.settings.special_tokens.get("pad_token")

    @property
    def unk_token(self) -> str | None:
        """The text of the token that stands for what the vocabulary lacks."""
        return self.settings.special_tokens.get("unk_token")

    @property
    def bos_token_id(self) -> int | None:
        """The id of the token that begins a text."""
        return self._find(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        """The id of the token that ends a text."""
        return self._find(self.eos_token)

    def get_added_vocab(self) -> dict[str, int]:
        """Tokens that are found in texts before anything else is, special or not: ids by text, in the ids' order."""
        added = self.backend_tokenizer.get_added_tokens_decoder()
        return {added[token].content: token for token in sorted(added)}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The text's token ids, with those that the model wants around it unless told otherwise."""
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of the tokens; no space is taken out of it."""
        return self.backend_tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def _find(self, token: str | None) -> int | None:
        if token is None:
            return None
        found = self.backend_tokenizer.token_to_id(token)
        # What the vocabulary lacks is what it writes for all that it lacks.
        return self.backend_tokenizer.token_to_id(self.unk_token) if found is None and self.unk_token else found
