from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.tandem_worker.engine.history_model import HistoryModel
from tests.tandem_worker.engine.rig import Rig


@pytest.fixture(autouse=True)
def one_torch_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    """Engines over a `HistoryModel`; at the end none may hold a block."""
    rigs: list[Rig] = []

    def make(model: Any = None, num_blocks: int = 64, **kw: Any) -> Rig:
        rigs.append(Rig(model or HistoryModel(), num_blocks, **kw))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()
        assert rig.engine._scheduler.blocks.num_held == 0
        assert rig.engine.failure is None
