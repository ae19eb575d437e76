"""Argument checks of the launchers: a kernel that is handed a wrong shape reads foreign memory instead of failing.

Shapes that disagree raise `ValueError`, dtypes and devices raise `TypeError`; the sentence names the argument, what
came and what is wanted. Checks cost a few microseconds, run on the host only, and are not repeated when a captured
CUDA graph is replayed.
"""

from __future__ import annotations

import torch

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INDEXES = (torch.int32, torch.int64)


def require_shape(name: str, tensor: torch.Tensor, shape: tuple[int | None, ...]) -> None:
    """Refuse another rank or extent; None accepts any extent."""
    fits = tensor.dim() == len(shape) and all(
        want is None or have == want for have, want in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if extent is None else str(extent) for extent in shape)
        raise ValueError(f"{name} must have shape [{wanted}], got {list(tensor.shape)}")


def require_dtype(name: str, tensor: torch.Tensor, *dtypes: torch.dtype) -> None:
    """Raises TypeError for another dtype than these."""
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name} must be {wanted}, got {str(tensor.dtype).removeprefix('torch.')}")


def require_rows(name: str, tensor: torch.Tensor) -> None:
    """Refuse a last axis that is not contiguous: vector loads depend on it."""
    if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} must be contiguous along its last axis, got strides {tensor.stride()}")


def require_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError for a tensor with gaps."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got shape {list(tensor.shape)} with strides {tensor.stride()}")


def require_same_device(leading: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Raises TypeError for a tensor that is not where `leading` is; None is everywhere."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != leading.device:
            raise TypeError(f"{name} is on {tensor.device}, the first argument on {leading.device}")


def result_like(
    name: str, out: torch.Tensor | None, shape: tuple[int, ...], like: torch.Tensor, *others: torch.dtype
) -> torch.Tensor:
    """`out` when it fits, else a new contiguous tensor of `shape` with dtype and device of `like`.

    A given one may be of one of the `others` dtypes too.
    """
    if out is None:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    require_shape(name, out, shape)
    require_dtype(name, out, like.dtype, *others)
    require_rows(name, out)
    require_same_device(like, **{name: out})
    return out
