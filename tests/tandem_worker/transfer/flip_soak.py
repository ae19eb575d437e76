"""Requests through a proxy that flips bits, between two engines; answers are compared with undisturbed ones.

The model's next token depends on every token that it reads through the block tables (`HistoryModel`): a block that is
wrong in one bit, or lies in the wrong place, gives another answer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tandem_worker.engine.schedule.params import FinishReason
from tandem_worker.transfer.blocks import BlockSpace
from tandem_worker.transfer.contract import Identity, TransferStats, TransferTimeouts
from tandem_worker.transfer.decode.client import TcpPrefillClient
from tandem_worker.transfer.prefill.server import TcpPrefillServer

from tests.tandem_worker.engine.history_model import HistoryModel, greedy_answer
from tests.tandem_worker.engine.rig import Rig
from tests.tandem_worker.transfer.flip_proxy import FlipProxy

TIMEOUTS = TransferTimeouts(retry_after=0.01)
WINDOW = 40
"""Requests inside at a time."""
NUM_TOKENS = 4


@dataclass(slots=True)
class FlipOutcome:
    requests: int = 0
    flips: int = 0
    wrong: int = 0
    failed: int = 0
    remote: int = 0
    fallbacks: int = 0
    decode: TransferStats | None = None
    prefill: TransferStats | None = None


def run_flips(num_requests: int, seed: int, every_bytes: int = 20_000) -> FlipOutcome:
    """Prompts share prefixes, so that a wrong block would show in later answers too; the last tenth runs undamaged."""
    rng = random.Random(seed)
    prefixes = [tuple(rng.randrange(64) for _ in range(40)) for _ in range(30)]
    prefill = Rig(HistoryModel(), 400, scheduler={"max_batch_tokens": 64})
    decode = Rig(HistoryModel(), 300, scheduler={"local_prefill_max_tokens": 2, "max_running_requests": 16})
    space = BlockSpace(prefill.engine.kv_cache)
    identity = Identity(worker="prefill-0", revision="r", model_digest="d", layout=space.layout.fingerprint)
    server = TcpPrefillServer(
        engine=prefill.engine, space=space, identity=identity, host="127.0.0.1", port=0, timeouts=TIMEOUTS
    )
    server.start()
    proxy = FlipProxy(f"127.0.0.1:{server.port}", seed, every_bytes)
    client = TcpPrefillClient(timeouts=TIMEOUTS)
    client.bind(decode.engine, BlockSpace(decode.engine.kv_cache), identity)
    decode.engine.prefill_client = client
    outcome = FlipOutcome()
    try:
        for start in range(0, num_requests, WINDOW):
            if start >= num_requests * 9 // 10:
                proxy.every_bytes = 0
            prompts = {
                f"r{index}": rng.choice(prefixes)[: rng.randint(0, 40)]
                + tuple(rng.randrange(64) for _ in range(rng.randint(3, 60)))
                for index in range(start, min(start + WINDOW, num_requests))
            }
            for name, prompt in prompts.items():
                decode.submit(name, prompt, NUM_TOKENS, prefill_endpoints=(proxy.endpoint,) * 2)
            decode.wait()
            for name, prompt in prompts.items():
                outcome.requests += 1
                outcome.failed += decode.out.reason(name) is FinishReason.ERROR
                outcome.wrong += decode.out.tokens(name) != greedy_answer(prompt, NUM_TOKENS)
            decode.out.deltas.clear()
        stats = decode.engine.stats()
        outcome.remote, outcome.fallbacks = stats.prefills_remote_total, stats.prefills_fallback_total
        outcome.decode, outcome.prefill, outcome.flips = client.stats(), server.stats(), proxy.flips
    finally:
        client.close()
        server.close()
        proxy.close()
        for rig in (decode, prefill):
            rig.close()
    assert decode.engine._scheduler.blocks.num_held == prefill.engine._scheduler.blocks.num_held == 0
    return outcome
