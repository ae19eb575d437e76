"""Packed weights as the library is told of them."""

from __future__ import annotations

import ctypes

from tandem_worker.model.backends.native import library
from tandem_worker.model.backends.native.layers import NativeLinear
from tandem_worker.model.layers.linear import Linear

_Address, _Index = ctypes.c_void_p, ctypes.c_ssize_t


class Matrix(ctypes.Structure):
    """`Matrix` of matrix.h."""

    _fields_ = (
        *((name, _Address) for name in ("weight", "bias")),
        *((name, _Index) for name in ("columns", "inner", "is_split")),
    )


def describe_matrix(matrix: Linear) -> Matrix:
    """Addresses and shapes; they hold as long as the matrix, which is packed, lives."""
    assert isinstance(matrix, NativeLinear)
    return Matrix(
        weight=matrix.address,
        bias=library.address_of(matrix.bias),
        columns=matrix.out_features,
        inner=matrix.in_features,
        is_split=int(matrix.is_split),
    )
