"""Prefill on one engine and decode on another, over TCP with checksums: for every family the tokens of one engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from tandem_worker.model.contract import CausalLM
from tandem_worker.model.load import load_model
from tandem_worker.transfer.blocks import BlockSpace
from tandem_worker.transfer.contract import Identity
from tandem_worker.transfer.decode.client import TcpPrefillClient
from tandem_worker.transfer.prefill.server import TcpPrefillServer

from tests.tandem_worker.engine.rig import BLOCK_SIZE, Rig
from tests.tandem_worker.families import FAMILIES, VOCAB_SIZE, assert_greedy, save_family

MakeRig = Callable[..., Rig]
CHUNK = 8
NUM_TOKENS = 6
NUM_BLOCKS = 1000  # nothing is evicted
SHORT = 2
"""Prompts with at most this many uncached tokens are prefilled by the decode worker."""


@contextmanager
def connect(prefill: Rig, decode: Rig) -> Iterator[str]:
    """Join the engines as their processes would be; yields the prefill end's address."""

    def space_of(rig: Rig, worker: str) -> tuple[BlockSpace, Identity]:
        space = BlockSpace(rig.engine.kv_cache)
        return space, Identity(worker=worker, revision="r", model_digest="d", layout=space.layout.fingerprint)

    space, identity = space_of(prefill, "prefill-0")
    server = TcpPrefillServer(engine=prefill.engine, space=space, identity=identity, host="127.0.0.1", port=0)
    client = TcpPrefillClient()
    client.bind(decode.engine, *space_of(decode, "decode-0"))
    decode.engine.prefill_client = client
    with ExitStack() as stack:
        stack.callback(server.close)
        stack.callback(client.close)
        server.start()
        yield f"127.0.0.1:{server.port}"
        assert client.stats().failures == client.stats().resends == 0
        assert client.stats().bytes_received > 0


def draw_prompts(lengths: list[int]) -> list[list[int]]:
    rng = random.Random(4)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


def check_family(family: str, folder: Path, make_rig: MakeRig, lengths: list[int], chunk: int = CHUNK) -> None:
    """Two turns of a conversation per length; the second one finds the first one's blocks cached."""
    reference = save_family(family, folder)

    def load() -> CausalLM:
        return load_model(folder, device=torch.device("cpu"), dtype=torch.float32)

    unified = make_rig(load(), num_blocks=NUM_BLOCKS, scheduler={"max_batch_tokens": chunk})
    prefill = make_rig(load(), num_blocks=NUM_BLOCKS, scheduler={"max_batch_tokens": chunk})
    decode = make_rig(load(), num_blocks=NUM_BLOCKS, scheduler={"local_prefill_max_tokens": SHORT})
    paced = make_rig(load(), num_blocks=NUM_BLOCKS)  # as a decode worker that converts, a block in each step
    prompts, questions = draw_prompts(lengths), draw_prompts([5] * len(lengths))
    with connect(prefill, decode) as endpoint:
        for turn in range(2):
            names = [f"{turn}-{index}" for index in range(len(prompts))]
            for name, prompt in zip(names, prompts, strict=True):
                unified.submit(name, prompt, NUM_TOKENS)
                decode.submit(name, prompt, NUM_TOKENS, prefill_endpoints=(endpoint,))
                paced.submit(name, prompt, NUM_TOKENS, step_seconds=1e-9)
            unified.wait()
            decode.wait()
            paced.wait()
            for index, name in enumerate(names):
                answer = decode.out.tokens(name)
                assert answer == unified.out.tokens(name) == paced.out.tokens(name)
                assert_greedy(reference, prompts[index], answer)
                assert decode.out.last(name).prefill_worker == "prefill-0"
                # of the second turn the prefill worker knows the full blocks of the first one's prompt
                cached = turn * (lengths[index] // BLOCK_SIZE * BLOCK_SIZE)
                assert decode.out.last(name).num_cached_tokens == cached
                prompts[index] = prompts[index] + answer + questions[index]
    stats = decode.engine.stats()
    assert (stats.prefills_remote_total, stats.prefills_fallback_total) == (2 * len(lengths), 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_those_of_one_engine_and_of_transformers(family: str, tmp_path: Path, make_rig: MakeRig) -> None:
    check_family(family, tmp_path, make_rig, [8, 21, 37])


@pytest.mark.full
@pytest.mark.parametrize("chunk", [5, 16, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_length_and_chunk(family: str, chunk: int, tmp_path: Path, make_rig: MakeRig) -> None:
    check_family(family, tmp_path, make_rig, [*range(3, 30), 31, 32, 33, 47, 48, 49, 63, 64, 65, 100], chunk)
