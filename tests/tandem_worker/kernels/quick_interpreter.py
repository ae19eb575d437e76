"""`pytest -p tests.tandem_worker.kernels.quick_interpreter`: Triton's interpreter without four things that it does over
and over, for nothing, in each operation of each program. What kernels compute with it stays the same to the last bit.

- For every function that a kernel calls, `tl.sum` and `tl.zeros` among them, it looks through all names of the language
  to replace them, which it has done when the kernel was launched.
- Integers are added and multiplied once more, in 64 bits, to see whether they overflow. What it sees it tells only
  where `debug` is set, which it never is.
- Which of numpy's types is meant is looked up in a table that is made anew each time.
- The shape of each value is made anew, a constant for each of its axes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_replace = interpreter._patch_lang
_replaced: set[ModuleType] = set()
"""Modules whose names are replaced while a launch lasts."""


class _Launch:
    """What is put back at its end."""

    def __init__(self, scope: Any) -> None:
        self._scope = scope

    def restore(self) -> None:
        _replaced.clear()
        self._scope.restore()


@cache
def _find_modules(fn: FunctionType) -> frozenset[ModuleType]:
    """Those whose names a function sees."""
    return frozenset(each for each in (tl, tl.core) if any(value is each for value in fn.__globals__.values()))


def _replace_once(fn: FunctionType) -> Any:
    seen = _find_modules(fn)
    if seen and seen <= _replaced:  # a function that the kernel calls: what it gets here it does not put back
        return None
    is_launch = not _replaced
    _replaced.update(seen)
    scope = _replace(fn)
    return _Launch(scope) if is_launch else scope


_look_up = interpreter._get_np_dtype
_types: dict[str, Any] = {}


def _look_up_once(dtype: Any) -> Any:
    name = dtype.scalar.name
    if name not in _types:
        _types[name] = _look_up(dtype)
    return _types[name]


_initialize = tl.tensor.__init__


@cache
def _make_shape(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Number of elements and shape of a value, which are never changed."""
    value = tl.tensor.__new__(tl.tensor)
    _initialize(value, None, tl.block_type(tl.int8, list(shape)) if shape else tl.int8)
    return value.numel, value.shape


def _initialize_quickly(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _make_shape(tuple(type.shape) if type.is_block() else ())


tl.tensor.__init__ = _initialize_quickly
interpreter._patch_lang = _replace_once
interpreter._get_np_dtype = _look_up_once
_options = interpreter.interpreter_builder.options
assert not _options.debug
interpreter.interpreter_builder.options = replace(_options, sanitize_overflow=False)
