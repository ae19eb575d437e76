from __future__ import annotations

import pytest
import torch
from tandem_worker.model.layers.embedding import Embedding, LMHead
from tandem_worker.model.layers.linear import HeadLinear
from tandem_worker.parallel.collectives import Collective
from torch.nn import functional

from tests.tandem_worker.model.layers.closeness import assert_near, random
from tests.tandem_worker.model.layers.ranks import run_ranks

VOCABULARY, HIDDEN = 11, 6
TOKENS = torch.tensor([0, 10, 3, 4, 4, 7])


def share(size: int) -> int:
    return -(-VOCABULARY // size)


def test_rows_of_the_whole_table() -> None:
    table = random(VOCABULARY, HIDDEN)
    assert torch.equal(Embedding(table, 0, None)(TOKENS), table[TOKENS])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_rows_of_a_split_table(size: int) -> None:
    """Vocabularies need not divide: the last rank's share is shorter."""
    table = random(VOCABULARY, HIDDEN)

    def work(ranks: Collective) -> torch.Tensor:
        first = ranks.rank * share(size)
        return Embedding(table[first : first + share(size)], first, ranks)(TOKENS)

    for found in run_ranks(size, work):
        assert torch.equal(found, table[TOKENS])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_logits_are_whole_on_every_rank(dtype: torch.dtype, size: int) -> None:
    """The last rank's rows are filled up, and what they would say is cut off again."""
    weight, hidden = random(VOCABULARY, HIDDEN, dtype=dtype), random(3, HIDDEN, seed=1, dtype=dtype)

    def work(ranks: Collective) -> torch.Tensor:
        rows = weight[ranks.rank * share(size) : (ranks.rank + 1) * share(size)]
        filled = functional.pad(rows, (0, 0, 0, share(size) - rows.shape[0]), value=50.0)
        return LMHead(HeadLinear(filled), VOCABULARY, ranks if size > 1 else None)(hidden)

    for logits in run_ranks(size, work):
        assert logits.dtype == torch.float32
        assert_near(logits, hidden.double() @ weight.double().t())
