from __future__ import annotations

from typing import Any

import pytest
import torch
from tandem_worker.model.layers.linear import Linear
from tandem_worker.model.load import load_model
from tandem_worker.model.weighing import count_weight_bytes

from e2e.model import find_model


class Slotted:
    __slots__ = ("absent", "first", "rest")
    __module__ = "tandem_worker.tests"

    def __init__(self, first: torch.Tensor, rest: dict[str, Any]) -> None:
        self.first, self.rest = first, rest


class Plain:
    __module__ = "tandem_worker.tests"

    def __init__(self, *parts: Any) -> None:
        self.parts = parts
        self.itself = self


def test_every_tensor_counts_once() -> None:
    table = torch.zeros(10, 8)
    inner = Slotted(table[2:], {"view": table[:1], "other": [torch.zeros(3, dtype=torch.bfloat16)]})
    assert count_weight_bytes(Plain(inner, table.t(), "text", 7)) == 10 * 8 * 4 + 3 * 2


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN here")
def test_packed_matrices_count_too() -> None:
    weight = torch.randn(128, 64)
    assert 128 * 64 * 4 <= count_weight_bytes(Linear(weight)) <= 2 * 128 * 64 * 4


def test_a_real_model_has_the_bytes_of_its_parameters() -> None:
    model = load_model(find_model(), device=torch.device("cpu"), dtype=torch.bfloat16)
    parameters = 134_515_008
    assert 2 * parameters <= count_weight_bytes(model) <= 2.1 * 2 * parameters + 49152 * 576 * 4
