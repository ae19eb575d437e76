from __future__ import annotations

from typing import Any

import pytest
import torch
from tandem_worker.model.backends import native
from tandem_worker.model.layers.embedding import Embedding
from tandem_worker.model.layers.linear import Linear
from tandem_worker.model.load import load_model
from tandem_worker.model.weighing import Matrices, count_matrices, count_weight_bytes

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
    model = load_model(find_model(), device=torch.device("cpu"), dtype=torch.bfloat16, weights="Plain")
    parameters = 134_515_008
    assert 2 * parameters <= count_weight_bytes(model) <= 2.1 * 2 * parameters + 49152 * 576 * 4


def test_matrices_are_counted_by_form_and_those_that_are_shared_once() -> None:
    table = torch.zeros(64, 16)
    layers = [Embedding(table, 0, None), Linear(torch.zeros(8, 16)), Linear(torch.zeros(8, 4), torch.zeros(8))]
    found = count_matrices(Plain(layers, {"again": layers}, Embedding(table, 0, None)))
    assert found.keys() == {"plain"}
    assert found["plain"].count == 3
    assert found["plain"].num_bytes >= 4 * (64 * 16 + 8 * 16 + 8 * 4)


def test_quantized_matrices_have_forms_of_their_own() -> None:
    from tandem_worker.kernels.quantized import Int4Weight, Mxfp4Weight

    int4 = Int4Weight(packed=torch.zeros(8, 4, dtype=torch.int32), scale=torch.zeros(8, 2))
    experts = Mxfp4Weight(
        packed=torch.zeros(3, 8, 16, dtype=torch.uint8), scale=torch.zeros(3, 8, 1, dtype=torch.uint8)
    )
    assert count_matrices(Plain(int4, experts)) == {
        "int4": Matrices(1, 8 * 4 * 4 + 8 * 2 * 4),
        "mxfp4": Matrices(1, 3 * 8 * 16 + 3 * 8),
    }


@pytest.mark.skipif(native.find_lossless_obstacle() is not None, reason="no kernels of 12 bits here")
def test_a_model_in_12_bits_has_one_tied_table() -> None:
    model = load_model(find_model(), device=torch.device("cpu"), dtype=torch.bfloat16, weights="Lossless")
    found = count_matrices(model)
    assert found.keys() == {"lossless"}
    assert found["lossless"].count == 30 * 4 + 1
    assert 0 <= count_weight_bytes(model) - found["lossless"].num_bytes < 1 << 20
