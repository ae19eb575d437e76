"""Guesses on the CPU kernels: every bit of every answer is that of an engine without them.

The gate has a share of what `-m full` has: every kind of request, alone and sixteen at once, moved, set back, and
prefilled by another worker.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tandem_api.launch import SpeculativeConfig
from tandem_worker.model.backends import native
from tandem_worker.model.contract import CausalLM
from tandem_worker.model.load import load_model
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.tandem_worker.engine.rig import Rig
from tests.tandem_worker.engine.test_resume import Alternating
from tests.tandem_worker.engine.test_speculation import Knowing, accepted, replace_guesser, run_all, tell
from tests.tandem_worker.engine.wire import Wire

pytestmark = pytest.mark.skipif(native.find_obstacle() is not None, reason=str(native.find_obstacle()))
MakeRig = Callable[..., Rig]
Requests = dict[str, tuple[tuple[int, ...], dict[str, Any]]]
VOCAB = 61
AUTO, OFF = SpeculativeConfig(method="Auto"), SpeculativeConfig(method="Off")
EAGER = SpeculativeConfig(method="Lookup", adaptive=False, max_tokens=7)
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"num_logprobs": 3},
    {"temperature": 0.7, "seed": 1},
    {"temperature": 1.0, "seed": 2, "top_p": 0.8, "top_k": 12, "num_logprobs": 0},
    {"temperature": 0.9, "seed": 3, "min_p": 0.1},
    {"presence_penalty": 0.4, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
    {"temperature": 1.0, "seed": 4, "logit_bias": {5: 6.0, 9: 6.0}, "n": 2},
    {"stop_token_ids": frozenset([7, 31]), "min_tokens": 8, "num_logprobs": 1},
    {"temperature": 0.5, "seed": 5, "n": 3},
    {"grammar": Alternating(), "temperature": 0.6, "seed": 6},
    {"prompt_logprobs": 2},
    {"prediction": (3, 4, 5, 6) * 6, "num_logprobs": 1},
)


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], CausalLM]:
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=4096,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.25)
    model.save_pretrained(folder)
    return lambda: load_model(folder, device=torch.device("cpu"), dtype=torch.bfloat16)


def draw_requests(count: int, seed: int, longest: int) -> Requests:
    """Prompts that repeat themselves, so that there is something to be found."""
    generator = random.Random(seed)
    requests: Requests = {}
    for number in range(count):
        piece = [generator.randrange(VOCAB) for _ in range(generator.randrange(2, 40))]
        prompt = (piece * (1 + generator.randrange(longest) // len(piece)))[:longest] + piece[: generator.randrange(9)]
        options = {"max_tokens": generator.randrange(2, 40), **KINDS[number % len(KINDS)]}
        requests[f"{number}"] = (tuple(prompt), options)
    return requests


def check(make_rig: MakeRig, load: Callable[[], CausalLM], requests: Requests, together: int) -> None:
    """Workers that guess by text, as much as pays and all there is, and one that is told answers and lies."""
    plain = make_rig(load(), num_blocks=20_000, speculative=OFF)
    rigs = [make_rig(load(), num_blocks=20_000, speculative=each) for each in (AUTO, EAGER, EAGER)]
    names = list(requests)
    for start in range(0, len(names), together):
        some = {name: requests[name] for name in names[start : start + together]}
        expected = run_all(plain, some)
        tell_answers(rigs[-1], some, expected)
        for rig in rigs:
            assert run_all(rig, some) == expected
    assert accepted(rigs[1]) > 0
    assert accepted(rigs[2]) > 5 * len(names)


def tell_answers(rig: Rig, requests: Requests, told: dict[tuple[str, int], Any]) -> None:
    answers = {(requests[name][0], choice): one["tokens"] for (name, choice), one in told.items() if name in requests}
    replace_guesser(rig, Knowing(answers, vocab=VOCAB))


@pytest.mark.parametrize("together", [1, 16])
def test_answers_are_the_same_to_the_last_bit(make_rig: MakeRig, load: Callable[[], CausalLM], together: int) -> None:
    check(make_rig, load, draw_requests(24, together, 120), together)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("together", [1, 16])
def test_a_thousand_answers_are_the_same(make_rig: MakeRig, load: Callable[[], CausalLM], together: int) -> None:
    check(make_rig, load, draw_requests(1000, 100 + together, 1500), together)


def test_long_contexts_with_and_without_room(make_rig: MakeRig, load: Callable[[], CausalLM]) -> None:
    """Beyond the places where sums over keys are cut; without room requests are set back and computed again."""
    requests: Requests = {}
    for number, length in enumerate((1015, 1020, 505)):
        options = KINDS[(1, 4, 7)[number]] | {"max_tokens": 30, "min_tokens": 30}
        requests[f"{number}"] = (tuple((number + 7 * place) % VOCAB for place in range(length)), options)
    expected = run_all(make_rig(load(), num_blocks=20_000, speculative=OFF), requests)
    for num_blocks, host_blocks in ((20_000, 0), (645, 0), (645, 600)):
        rig = make_rig(load(), num_blocks=num_blocks, host_blocks=host_blocks, speculative=EAGER)
        tell_answers(rig, requests, expected)
        assert drop_cached(run_all(rig, requests)) == drop_cached(expected)
        assert (rig.engine.stats().preemptions_total > 0) is (num_blocks == 645)
        assert accepted(rig) > 20


def drop_cached(told: dict[Any, Any]) -> dict[Any, Any]:
    return {key: {**one, "cached": None} for key, one in told.items()}


def check_moves(make_rig: MakeRig, load: Callable[[], CausalLM], count: int) -> None:
    """Back and forth between workers that guess and one that does not, at places drawn at random."""
    generator = random.Random(count)
    workers = [make_rig(load(), num_blocks=20_000, speculative=each) for each in (OFF, EAGER, AUTO)]
    requests = {
        name: (prompt, options)
        for name, (prompt, options) in draw_requests(count, 9, 200).items()
        if not options.keys() & {"n", "prompt_logprobs"}
    }
    expected = {key[0]: one["tokens"] for key, one in run_all(workers[0], requests).items()}
    for name, (prompt, options) in requests.items():
        tokens = expected[name]
        for cut in sorted({generator.randrange(1, len(tokens)) for _ in range(3)} if len(tokens) > 1 else ()):
            worker = workers[generator.randrange(1, 3)]
            if worker is workers[1]:
                replace_guesser(worker, Knowing({(prompt, 0): tokens}, vocab=VOCAB))
            moved = f"{name} {cut}"
            worker.resume(moved, prompt, (tuple(tokens[:cut]),), **options)
            worker.wait()
            assert tell(worker.out.deltas[moved, 0])["tokens"] == tokens[cut:]


def test_streams_that_move_say_the_same(make_rig: MakeRig, load: Callable[[], CausalLM]) -> None:
    check_moves(make_rig, load, 20)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_thousand_moves(make_rig: MakeRig, load: Callable[[], CausalLM]) -> None:
    check_moves(make_rig, load, 400)


def test_prompts_of_another_worker_are_answered_the_same(make_rig: MakeRig, load: Callable[[], CausalLM]) -> None:
    requests = {
        name: (prompt, {**options, "prefill_endpoints": ("p:1",)})
        for name, (prompt, options) in draw_requests(12, 3, 150).items()
        if "prompt_logprobs" not in options
    }
    expected = run_all(make_rig(load(), num_blocks=20_000, speculative=OFF), requests)
    prefill = make_rig(load(), num_blocks=5000, speculative=AUTO)
    decode = make_rig(load(), num_blocks=5000, speculative=EAGER, scheduler={"local_prefill_max_tokens": 4})
    tell_answers(decode, requests, expected)
    Wire(prefill.engine, decode.engine)
    assert drop_cached(run_all(decode, requests)) == drop_cached(expected)
    assert decode.engine.stats().prefills_remote_total > 5
    assert accepted(decode) > 20
