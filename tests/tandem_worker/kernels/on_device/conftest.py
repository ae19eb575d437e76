"""Every kernel against its twin: on a GPU where there is one, else in Triton's interpreter.

The same tests serve both. In the interpreter (`TRITON_INTERPRET=1`, set before Triton is imported, so in a process of
their own: see `test_interpreter.py`) tensors live on the CPU and are float32 or float16: the interpreter's bfloat16
products are not to be trusted. On a GPU bfloat16 joins them. The oracle is the twin in float64.
"""

from __future__ import annotations

import pytest
import torch
from tandem_worker.kernels.dispatch import interpreting

INTERPRETING = interpreting()
ON_GPU = torch.cuda.is_available() and not INTERPRETING
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if ON_GPU else [])
HALF_DTYPES = DTYPES[1:]
MAX_ERROR_RATIO = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2, torch.float64: 1e-9}


def pytest_collection_modifyitems(items):
    for item in items:
        if "on_device" not in str(item.path):
            continue
        if not INTERPRETING:
            item.add_marker(pytest.mark.gpu)
            if not ON_GPU:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device (test_interpreter.py runs it without)"))


def pytest_generate_tests(metafunc):
    if "dtype" in metafunc.fixturenames:
        metafunc.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
    if "half_dtype" in metafunc.fixturenames:
        metafunc.parametrize("half_dtype", HALF_DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(20)


@pytest.fixture
def randn(device, generator):
    """Normal values of a dtype on the device, drawn on the CPU so that every device sees the same."""

    def draw(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype).to(device)

    return draw


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch):
    """`torch.empty` returns NaN (integers: a value no test expects), so an element nobody wrote cannot pass."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 113)

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture
def assert_matches():
    """Compare by |actual - expected| / |expected| over the whole tensor; NaN never passes."""

    def check(actual: torch.Tensor, expected: torch.Tensor, max_ratio: float | None = None) -> None:
        assert actual.shape == expected.shape
        limit = MAX_ERROR_RATIO[actual.dtype] if max_ratio is None else max_ratio
        actual, expected = actual.double(), expected.double()
        assert torch.isfinite(actual).all(), "result has elements that are not finite"
        error = (actual - expected).norm() / expected.norm().clamp_min(1e-12)
        assert error <= limit, f"error ratio {error:.2e} exceeds {limit:.0e}"

    return check


@pytest.fixture
def wide():
    """Float64 copies for the oracle: floating tensors are widened, the rest passes through."""

    def convert(*values):
        converted = [
            value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for value in values
        ]
        return converted[0] if len(converted) == 1 else converted

    return convert


@pytest.fixture
def rows_alike(monkeypatch):
    """A tile's rows are multiplied each in the same way, as tensor cores do it. The interpreter leaves products to
    numpy, whose BLAS rounds a row by its place in the tile."""
    if not INTERPRETING:
        return
    import numpy as np
    from triton.runtime import interpreter

    def multiply(self, a, b, d, input_precision, max_num_imprecise_acc):
        del self, input_precision, max_num_imprecise_acc
        rows = [np.matmul(row[None], b.data, dtype=d.data.dtype) for row in a.data]
        return interpreter.TensorHandle(np.concatenate(rows) + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", multiply)
