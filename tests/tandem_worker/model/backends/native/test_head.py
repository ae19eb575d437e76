"""A draft head in one call: what it gives is what torch computes of the same weights, kernel by kernel in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tandem_worker.engine.execute.arena import AllocationCounter
from tandem_worker.model.backends import native
from tandem_worker.model.layers.draft import HeadCalls, HeadParts
from tandem_worker.model.layers.embedding import LMHead
from tandem_worker.model.layers.rotary import RotaryEmbedding
from tandem_worker.model.rope import RopeConfig
from torch.nn import functional

if (obstacle := native.find_obstacle()) is not None:
    pytest.skip(obstacle, allow_module_level=True)

from tandem_worker.model.backends.native.backend import NATIVE
from tandem_worker.model.backends.native.head import build_head_calls, find_obstacle
from tandem_worker.model.backends.native.layers import PACKS

if not PACKS:
    pytest.skip("with AMX a head is computed kernel by kernel", allow_module_level=True)

HIDDEN, HEADS, KV_HEADS, DIM, WIDE, GUESSED, SIZE = 96, 6, 2, 32, 128, 70, 4
EPS = 1e-5


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 31 * sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).bfloat16()


class Weights:
    """Of a head, plain."""

    def __init__(self, *, bias: bool) -> None:
        self.norms = [1 + random(HIDDEN, seed=seed, scale=0.1) for seed in range(4)]
        self.queries = random(HEADS * DIM, 2 * HIDDEN, seed=1, scale=0.1)
        self.keys_values = random(2 * KV_HEADS * DIM, 2 * HIDDEN, seed=2, scale=0.1)
        self.out = random(HIDDEN, HEADS * DIM, seed=3, scale=0.1)
        self.gate_up = random(2 * WIDE, HIDDEN, seed=4, scale=0.1)
        self.down = random(HIDDEN, WIDE, seed=5, scale=0.1)
        self.output = random(GUESSED, HIDDEN, seed=6, scale=0.1)
        self.biases = [random(size, seed=7) if bias else None for size in (HEADS * DIM, 2 * KV_HEADS * DIM, HIDDEN)]

    def parts(self, **switches: bool) -> HeadParts:
        norms = [NATIVE.norm(norm, EPS) for norm in self.norms]
        rope = RopeConfig(theta=10000.0, kind="default", scaling={})
        rotary = RotaryEmbedding(
            rope, DIM, max_position_embeddings=4096, device=torch.device("cpu"), rotation=NATIVE.rotation
        )
        return HeadParts(
            input_norm=norms[0],
            state_norm=norms[1],
            mlp_norm=norms[2],
            norm=norms[3],
            queries=NATIVE.linear(self.queries, self.biases[0]),
            keys_values=NATIVE.linear(self.keys_values, self.biases[1]),
            out=NATIVE.linear(self.out, self.biases[2]),
            mlp=NATIVE.mlp(NATIVE.linear(self.gate_up), NATIVE.linear(self.down)),
            output=LMHead(NATIVE.head(self.output), GUESSED, None),
            rotary=rotary,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            **({"adds_normed": False, "gives_normed": False} | switches),
        )


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight.double(), EPS)


def rotate(heads: torch.Tensor, position: int) -> torch.Tensor:
    angles = position / 10000.0 ** (torch.arange(0, DIM, 2).double() / DIM)
    first, second = heads.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Reference:
    """One chain in float64."""

    def __init__(self, weights: Weights, **switches: bool) -> None:
        self._weights, self._switches = weights, switches
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def enter(self, embedded: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        norms = self._weights.norms
        return torch.cat((norm(embedded.double(), norms[0]), norm(state.double(), norms[1])))

    def write(self, embedded: torch.Tensor, state: torch.Tensor, position: int) -> None:
        made = self._multiply(self._weights.keys_values, self.enter(embedded, state), 1).view(2, KV_HEADS, DIM)
        self.keys.append(rotate(made[0], position))
        self.values.append(made[1])

    def advance(self, embedded: torch.Tensor, state: torch.Tensor, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        weights = self._weights
        self.write(embedded, state, position)
        entry = self.enter(embedded, state)
        queries = rotate(self._multiply(weights.queries, entry, 0).view(HEADS, DIM), position)
        group = HEADS // KV_HEADS
        keys, values = (torch.stack(each, 1).repeat_interleave(group, 0) for each in (self.keys, self.values))
        shares = (torch.einsum("hd,hnd->hn", queries, keys) / DIM**0.5).softmax(-1)
        attended = torch.einsum("hn,hnd->hd", shares, values).flatten()
        residual = entry[HIDDEN:] if self._switches.get("adds_normed") else state.double()
        stream = residual + self._multiply(weights.out, attended, 2)
        gate, up = (weights.gate_up.double() @ norm(stream, weights.norms[2])).chunk(2)
        stream = stream + weights.down.double() @ (functional.silu(gate) * up)
        normed = norm(stream, weights.norms[3])
        return weights.output.double() @ normed, normed if self._switches.get("gives_normed") else stream

    def _multiply(self, weight: torch.Tensor, x: torch.Tensor, place: int) -> torch.Tensor:
        bias = self._weights.biases[place]
        return weight.double() @ x + (0 if bias is None else bias.double())


def close(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    return float((mine.double() - theirs).norm() / theirs.norm()) < 0.02


def build(weights: Weights, **switches: bool) -> HeadCalls:
    calls = build_head_calls(weights.parts(**switches), SIZE)
    assert calls is not None
    return calls


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("switches", [{}, {"adds_normed": True}, {"gives_normed": True}], ids=str)
@pytest.mark.parametrize("lengths", [(1,), (2,), (7, 1, 4, 30), (3, 5, 8, 9, 1, 1, 40)], ids=str)
def test_chains_go_on_as_the_formula_says(lengths: Sequence[int], switches: dict[str, bool], bias: bool) -> None:
    """Texts of so many tokens, with entries from the second one on, and two guesses behind each; slots that have no
    entry hold what would spoil every sum."""
    weights = Weights(bias=bias)
    calls = build(weights, **switches)
    references = [Reference(weights, **switches) for _ in lengths]
    contexts: list[torch.Tensor] = []
    for number, (length, reference) in enumerate(zip(lengths, references, strict=True)):
        context = torch.full((-(-(length + 2) // SIZE), 2, KV_HEADS, SIZE, DIM), 1e30).bfloat16()
        context[0, :, :, 0] = 0.0
        contexts.append(context)
        if length > 1:
            embedded, states = random(length - 1, HIDDEN, seed=number), random(length - 1, HIDDEN, seed=50 + number)
            calls.write(embedded, states, torch.arange(length - 1), context, torch.arange(1, length))
            for place in range(length - 1):
                reference.write(embedded[place], states[place], place)
    states = random(len(lengths), HIDDEN, seed=99)
    for depth in range(2):
        embedded = random(len(lengths), HIDDEN, seed=200 + depth)
        places = [length - 1 + depth for length in lengths]
        expected = [
            reference.advance(embedded[row], states[row], places[row]) for row, reference in enumerate(references)
        ]
        logits, states = calls.advance(embedded, states, places, contexts, [place + 1 for place in places])
        assert close(logits, torch.stack([each[0] for each in expected]))
        assert close(states, torch.stack([each[1] for each in expected]))
        states = states.clone()


def test_a_chain_is_the_same_beside_others() -> None:
    weights = Weights(bias=False)
    calls = build(weights)
    contexts = [random(8, 2, KV_HEADS, SIZE, DIM, seed=number) for number in range(9)]
    embedded, states = random(9, HIDDEN, seed=1), random(9, HIDDEN, seed=2)
    slots = [3 * number + 2 for number in range(9)]
    places = [slot - 1 for slot in slots]
    together = calls.advance(embedded, states, places, [context.clone() for context in contexts], slots)
    for row in range(9):
        alone = calls.advance(
            embedded[row : row + 1], states[row : row + 1], [places[row]], [contexts[row]], [slots[row]]
        )
        assert torch.equal(alone[0][0], together[0][row])
        assert torch.equal(alone[1][0], together[1][row])


def test_positions_beyond_those_that_were_known() -> None:
    weights = Weights(bias=False)
    calls = build(weights)
    embedded, states = random(2, HIDDEN, seed=1), random(2, HIDDEN, seed=2)
    layer = torch.zeros(2, 2, KV_HEADS, SIZE, DIM, dtype=torch.bfloat16)
    for first in (0, 5000):
        calls.write(embedded, states, torch.arange(first, first + 2), layer, torch.tensor([5, 2]))
        for row, (block, slot) in enumerate(((1, 1), (0, 2))):
            reference = Reference(weights)
            reference.write(embedded[row], states[row], first + row)
            assert close(layer[block, 0, :, slot], reference.keys[0])
            assert close(layer[block, 1, :, slot], reference.values[0])


def test_long_texts_take_little_more_than_their_rotations() -> None:
    """Neither for good nor while these are made: an engine's memory is given away before."""
    weights = Weights(bias=False)
    calls = build(weights)
    layer = torch.zeros(2, 2, KV_HEADS, SIZE, DIM, dtype=torch.bfloat16)
    embedded, states = random(1, HIDDEN, seed=1), random(1, HIDDEN, seed=2)
    last = 100_000
    needed = 2 * (last + 1) * DIM // 2 * 2
    peaks: list[int] = []
    for position in (5, last // 3, last, last + 100):
        with AllocationCounter() as counter:
            calls.write(embedded, states, torch.tensor([position]), layer, torch.tensor([1]))
        peaks.append(counter.peak)
        reference = Reference(weights)
        reference.write(embedded[0], states[0], position)
        assert close(layer[0, 0, :, 1], reference.keys[0])
    assert max(peaks) < 2.5 * needed
    assert peaks[-1] < needed / 100, "it is known already"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda parts: {"head_dim": 24}, "the width of its heads is no multiple of 16"),
        (lambda parts: {"norm": NATIVE.norm(parts.norm.weight, 1e-6)}, "its norms differ in what they add"),
        (lambda parts: {"out": NATIVE.linear(random(HIDDEN, 63))}, "its matrices have another layout"),
        (
            lambda parts: {"mlp": NATIVE.mlp(NATIVE.linear(random(96, HIDDEN)), NATIVE.linear(random(HIDDEN, 48)))},
            "the width of its MLP is no multiple of 64",
        ),
    ],
)
def test_what_is_not_taken(change: Any, why: str) -> None:
    parts = Weights(bias=False).parts()
    parts = replace(parts, **change(parts))
    assert find_obstacle(parts) == why
    assert build_head_calls(parts, SIZE) is None
