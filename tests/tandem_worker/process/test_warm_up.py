from __future__ import annotations

import pytest
import torch
from tandem_worker.engine.sample.device_sampler import DeviceSampler
from tandem_worker.host.errors import StartupError
from tandem_worker.model.pooling import EmbeddingSpec, Pooling
from tandem_worker.process.warm_up import Ends, plan_warm_up, warm_up

from tests.tandem_worker.engine.history_model import HistoryModel
from tests.tandem_worker.engine.rig import Rig


def build_rig() -> tuple[Rig, Ends]:
    rig, ends = Rig(HistoryModel()), Ends()
    rig.engine.deliver_to(ends.deliver)
    return rig, ends


def test_a_gpu_computes_every_tile_and_every_way_to_choose() -> None:
    rig, ends = build_rig()
    rig.engine._executor.sampler = DeviceSampler(rig.model.vocab_size, torch.device("cpu"))
    requests = plan_warm_up(rig.engine.max_model_len, None, compiles=True)
    warm_up(rig.engine, ends, requests)
    assert rig.model.num_tokens == 2 + 3 + 4 + 8 + 16 + 32 + 64 + 128 + 3 * 2, "none finds another in the prefix cache"
    rig.close()


@pytest.mark.parametrize("max_model_len", [3, 5, 40, 129, 4096])
@pytest.mark.parametrize("embedding", [None, EmbeddingSpec(size=4, pooling=Pooling.LAST, normalize=True)])
def test_requests_fit_the_model(max_model_len: int, embedding: EmbeddingSpec | None) -> None:
    for compiles in (False, True):
        planned = plan_warm_up(max_model_len, embedding, compiles=compiles)
        assert all(len(r.prompt_token_ids) + r.sampling.max_tokens <= max_model_len for r in planned)
        assert len({r.request_id for r in planned}) == len(planned) >= 1
    assert len(plan_warm_up(max_model_len, embedding, compiles=False)) == 1


def test_a_broken_model_is_found_out() -> None:
    rig, ends = build_rig()
    rig.model.fail_once = ValueError("no weights")
    with pytest.raises(StartupError, match=r"could not be computed.*no weights"):
        warm_up(rig.engine, ends, plan_warm_up(rig.engine.max_model_len, None, compiles=False))
    rig.close()
