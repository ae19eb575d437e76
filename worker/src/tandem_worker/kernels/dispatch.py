"""The one place that decides whether an operation runs as a Triton kernel or as its plain-torch twin.

CUDA tensors go to the kernel, others to the twin. Under `TRITON_INTERPRET=1` Triton's interpreter takes CPU tensors
too, which is how the kernels are tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from triton import knobs

FUSED_MATH: dict[str, Any] = {"enable_fp_fusion": True}
"""Options of every launch: multiply-adds fuse, whatever the Triton release does when not told (3.10 changes it)."""

P = ParamSpec("P")
R = TypeVar("R")


def interpreting() -> bool:
    """True when kernels are executed by Triton's interpreter (decided when Triton was imported)."""
    return bool(knobs.runtime.interpret)


def runs_on_triton(tensor: torch.Tensor) -> bool:
    """Whether an operation whose leading argument is `tensor` is launched as a kernel."""
    return tensor.is_cuda or interpreting()


def with_twin(twin: Callable[P, R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make `op` call `twin` where no kernel can run. The first positional argument decides, so it is a tensor."""

    def decorate(op: Callable[P, R]) -> Callable[P, R]:
        @wraps(op)
        def dispatched(*args: P.args, **kwargs: P.kwargs) -> R:
            leading = args[0]
            if not isinstance(leading, torch.Tensor):
                raise TypeError(f"{op.__name__}: the first argument must be a tensor, got {type(leading).__name__}")
            return op(*args, **kwargs) if runs_on_triton(leading) else twin(*args, **kwargs)

        return dispatched

    return decorate
