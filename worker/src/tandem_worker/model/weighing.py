"""How much memory a model's weights take, by asking the model itself.

What the process grew by while it was loaded would say less: other parts of a start run at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


def count_weight_bytes(model: object) -> int:
    """Bytes of all tensors that `model` holds, however deep; what several share counts once."""
    sizes: dict[int, int] = {}
    seen: set[int] = set()
    left = [model]
    while left:
        thing = left.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            address, size = _observe(thing)
            sizes[address] = max(size, sizes.get(address, 0))
        else:
            left.extend(_parts(thing))
    return sum(sizes.values())


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
