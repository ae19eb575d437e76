"""The tensors of a published EAGLE-3 head, whichever of its names they have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

import torch
from tandem_api.wording import name_some

from tandem_worker.host.errors import StartupError
from tandem_worker.model.checkpoint.files import find_safetensors, is_packed
from tandem_worker.model.checkpoint.safetensors import SafetensorsSource
from tandem_worker.model.checkpoint.stored import Slice, Stored
from tandem_worker.model.coverage import SHOWN

LAYER = "layers.0."
_OTHER_LAYER = "midlayer."
DRAFT_TO_TARGET, TARGET_TO_DRAFT = "d2t", "t2d"
EMBEDDING = "embed_tokens.weight"
_LEFT = (".rotary_emb.inv_freq",)
"""Ends of tensors that follow from the configuration."""


class HeadSource:
    """Shows `midlayer...` as `layers.0...`, and remembers what was taken; satisfies `WeightSource`."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._source = SafetensorsSource(files)
        found = list(self._source.names())
        layouts = {prefix for prefix in (LAYER, _OTHER_LAYER) if any(name.startswith(prefix) for name in found)}
        if len(layouts) != 1:
            what = "both" if layouts else "neither"
            raise StartupError(
                "DraftUnsupported",
                f"The draft head has {what} of the layouts that are known: tensors of its layer are called {LAYER}NAME "
                f"or {_OTHER_LAYER}NAME.",
            )
        (layout,) = layouts
        self._names = {name.replace(layout, LAYER, 1) if name.startswith(layout) else name: name for name in found}
        self._taken: set[str] = set()

    def names(self) -> Iterable[str]:
        return self._names

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._names[name])

    def dtype(self, name: str) -> torch.dtype:
        return self._source.dtype(self._names[name])

    def stored(self, name: str) -> Stored | None:
        self._taken.add(name)
        return self._source.stored(self._names[name])

    def read(self, name: str, part: Slice | None = None) -> torch.Tensor:
        self._taken.add(name)
        return self._source.read(self._names[name], part)

    def check_taken(self, others: AbstractSet[str]) -> None:
        """Raises StartupError for tensors that nothing has read, and that are none of the `others`, which other ranks
        may have read: a part of the head that is not computed here."""
        known = self._taken | others
        left = sorted(name for name in self._names if name not in known and not name.endswith(_LEFT))
        if left:
            raise StartupError(
                "DraftUnsupported",
                f"The draft head has tensors that are not computed with here: {name_some(left, SHOWN)}. It is no "
                "EAGLE-3 head of one layer, or its config.json lacks the switch that they belong to.",
            )


def open_head(path: Path) -> HeadSource:
    """The tensors of the head in the folder `path`. Raises StartupError."""
    files = find_safetensors(path) if path.is_dir() else []
    if not files or is_packed(path):
        raise StartupError(
            "WeightsNotFound", f"The draft at {path} holds no *.safetensors files, the form in which heads are read."
        )
    return HeadSource(files)


def read_vocabulary(source: HeadSource, draft_size: int, target_size: int) -> torch.Tensor | None:
    """`[draft_size]` int64: the model's number of each token that the head can guess; None where they are the same.

    Raises StartupError where `d2t` is missing, does not lead into the vocabulary, or contradicts `t2d`.
    """
    wide = None
    if TARGET_TO_DRAFT in source:
        wide = source.read(TARGET_TO_DRAFT)
        if tuple(wide.shape) != (target_size,):
            raise _mismatched(f"t2d has shape {list(wide.shape)}, not [{target_size}]")
    if DRAFT_TO_TARGET not in source:
        if draft_size != target_size:
            raise StartupError(
                "WeightsIncomplete",
                f"The draft head guesses {draft_size} of {target_size} tokens, but has no d2t that says which.",
            )
        return None
    offsets = source.read(DRAFT_TO_TARGET)
    if tuple(offsets.shape) != (draft_size,):
        raise _mismatched(f"d2t has shape {list(offsets.shape)}, not [{draft_size}]")
    tokens = torch.arange(draft_size) + offsets.to(torch.int64)
    if bool((tokens < 0).any()) or bool((tokens >= target_size).any()):
        raise _mismatched(f"d2t leads to tokens that are not in the model's vocabulary of {target_size}")
    if wide is not None and not bool(wide.to(torch.bool)[tokens].all()):
        raise _mismatched("d2t leads to tokens that t2d leaves out")
    return tokens


def _mismatched(what: str) -> StartupError:
    return StartupError("WeightsShapeMismatch", f"The draft head's vocabulary does not fit: {what}.")
