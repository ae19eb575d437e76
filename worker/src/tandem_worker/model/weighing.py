"""How much memory a model's weights take, and in which forms, by asking the model itself.

What the process grew by while it was loaded would say less: other parts of a start run at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tandem_worker.model.checkpoint.split import IS_SPLIT
from tandem_worker.model.checkpoint.stored import PackedWeight
from tandem_worker.model.layers.embedding import Embedding
from tandem_worker.model.layers.linear import HeadLinear, Linear
from tandem_worker.model.layers.moe import Experts

_FORMS = {"Fp8Weight": "fp8", "Int4Weight": "int4", "Mxfp4Weight": "mxfp4", "SplitByteWeight": "lossless"}


@dataclass(frozen=True, slots=True)
class Matrices:
    """Matrices of one form; experts that lie in one tensor are one."""

    count: int = 0
    num_bytes: int = 0


def count_matrices(model: object) -> dict[str, Matrices]:
    """Matrices that are multiplied or looked up, by form: `plain`, `lossless`, `fp8`, `int4`, `mxfp4`. What several
    layers share counts once."""
    found: dict[str, Matrices] = {}
    places: set[int] = set()
    for thing in walk(model):
        for form, tensors in _matrices_of(thing):
            observed = [_observe(tensor) for tensor in tensors]
            if observed[0][0] not in places:
                places.add(observed[0][0])
                so_far = found.get(form, Matrices())
                found[form] = Matrices(so_far.count + 1, so_far.num_bytes + sum(size for _, size in observed))
    return found


def _matrices_of(thing: object) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Forms of the matrices that an object holds itself, and their tensors."""
    kind = _FORMS.get(type(thing).__name__)
    if kind is not None:
        yield kind, [value for value in _parts(thing) if isinstance(value, torch.Tensor)]
    elif isinstance(thing, PackedWeight):
        yield _form_of(thing.memory), [thing.memory]
    elif isinstance(thing, Linear | HeadLinear | Embedding | Experts):
        least = 3 if isinstance(thing, Experts) else 1
        for name in ("weight", "form", "table", "_stacked_gate_up", "_stacked_down"):
            value = getattr(thing, name, None)
            if isinstance(value, torch.Tensor) and value.dim() >= least:
                yield _form_of(value), [value]


def _form_of(memory: torch.Tensor) -> str:
    return "lossless" if memory.dtype == torch.uint8 and bool(memory[IS_SPLIT]) else "plain"


def count_weight_bytes(model: object) -> int:
    """Bytes of all tensors that `model` holds, however deep; what several share counts once."""
    sizes: dict[int, int] = {}
    for thing in walk(model):
        if isinstance(thing, torch.Tensor):
            address, size = _observe(thing)
            sizes[address] = max(size, sizes.get(address, 0))
    return sum(sizes.values())


def walk(model: object) -> Iterator[object]:
    """Everything that the model is made of, once."""
    seen: set[int] = set()
    left = [model]
    while left:
        thing = left.pop()
        if id(thing) not in seen:
            seen.add(id(thing))
            yield thing
            left.extend(() if isinstance(thing, torch.Tensor) else _parts(thing))


def _observe(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of a tensor's memory, and its bytes."""
    if tensor.layout is torch.strided:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    return torch.ops.mkldnn.data_ptr(tensor), torch.ops.mkldnn._nbytes(tensor)


def _parts(thing: object) -> Iterator[Any]:
    """What an object of this package, or a collection, is made of; nothing of other libraries' objects."""
    if isinstance(thing, Mapping):
        yield from thing.values()
    elif isinstance(thing, list | tuple | set | frozenset):
        yield from thing
    elif type(thing).__module__.startswith("tandem_worker."):
        yield from getattr(thing, "__dict__", {}).values()
        for kind in type(thing).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(thing, name):
                    yield getattr(thing, name)
