"""Both samplers choose the same tokens, and the device's does not build its parameters anew without need.

On a CPU the kernels' twins run; `kernels/on_device/test_sampling.py` compares kernels with twins.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_worker.engine.sample.contract import NO_TOKEN, CheckedRows
from tandem_worker.engine.sample.device_sampler import DeviceSampler
from tandem_worker.engine.sample.host_sampler import HostSampler
from tandem_worker.engine.sample.state import SamplingState
from tandem_worker.engine.schedule.request import Sequence

from tests.tandem_worker.engine.sample.test_host_sampler import VOCAB, Forbidding, build_sequence, random_logits

CPU = torch.device("cpu")
OPTIONS = st.fixed_dictionaries(
    {
        "seed": st.integers(-(2**63), 2**64 - 1),
        "temperature": st.sampled_from([0.0, 1e-9, 0.3, 1.0, 2.5]),
        "top_k": st.sampled_from([0, 1, 5, 300, VOCAB, VOCAB + 9]),
        "top_p": st.sampled_from([1.0, 0.01, 0.5, 0.95]),
        "min_p": st.sampled_from([0.0, 0.02, 0.5, 1.0]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 0.7]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, -0.4]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3]),
        "logit_bias": st.sampled_from([{}, {7: 3.0}, {2: 50.0, 9: -100.0}]),
        "min_tokens": st.sampled_from([0, 0, 3]),
    }
)


def sampler() -> DeviceSampler:
    return DeviceSampler(VOCAB, CPU)


def answers(sampler: Any, options: list[dict[str, Any]], num_steps: int) -> list[list[int]]:
    """Tokens of sequences that are sampled together; the logits are the same for every sampler."""
    sequences = [build_sequence(choice=row, **params) for row, params in enumerate(options)]
    for step in range(num_steps):
        tokens = sampler.choose_tokens(random_logits(len(options), step), sequences).tolist()
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.output.append(token)
    return [sequence.output for sequence in sequences]


@settings(max_examples=60, deadline=None)
@given(options=st.lists(OPTIONS, min_size=1, max_size=4))
def test_both_samplers_choose_the_same_tokens(options: list[dict[str, Any]]) -> None:
    assert answers(sampler(), options, 5) == answers(HostSampler(), options, 5)


def check_at_once(device: DeviceSampler, logits: torch.Tensor, checked: list[CheckedRows]) -> list[int]:
    """Take in what is accepted, and say how many tokens each sequence got."""
    tokens = device.choose_checked(logits, checked).tolist()
    taken: list[int] = []
    for each in checked:
        own, tokens = tokens[: 1 + len(each.guesses)], tokens[1 + len(each.guesses) :]
        right = next((at for at, pair in enumerate(zip(own, each.guesses, strict=False)) if pair[0] != pair[1]), None)
        accepted = own[: len(own) if right is None else right + 1]
        each.sequence.output.extend(accepted)
        taken.append(len(accepted))
    return taken


def one_by_one(logits: torch.Tensor, checked: list[CheckedRows], taken: list[int]) -> None:
    """The same by the host's sampler, which knows nothing of guesses."""
    host = HostSampler()
    for each, count in zip(checked, taken, strict=True):
        for place in range(count):
            row = logits[each.row + place : each.row + place + 1]
            each.sequence.output += host.choose_tokens(row, [each.sequence]).tolist()


@settings(max_examples=60, deadline=None)
@given(
    options=st.lists(OPTIONS, min_size=1, max_size=4),
    steps=st.lists(st.lists(st.integers(0, 4), min_size=4, max_size=4), min_size=1, max_size=5),
    luck=st.floats(0, 1),
    generator=st.randoms(use_true_random=False),
    gap=st.integers(0, 2),
)
def test_guesses_checked_at_once_give_the_tokens_of_one_by_one(
    options: list[dict[str, Any]], steps: list[list[int]], luck: float, generator: Any, gap: int
) -> None:
    """Also with steps without guesses between them, and rows of others between those of the sequences."""
    device = sampler()
    ours, theirs = ([build_sequence(choice=row, **each) for row, each in enumerate(options)] for _ in range(2))
    for number, widths in enumerate(steps):
        rows = [1 + count for count in widths[: len(ours)]]
        starts = [sum(rows[:index]) + index * gap for index in range(len(rows))]
        logits = alike_logits(starts[-1] + rows[-1] + gap, number)
        peeked = [list(sequence.output) for sequence in ours]
        guesses = [guess_some(logits[at:], sequence, count - 1, luck, generator) for at, sequence, count in
                   zip(starts, theirs, rows, strict=True)]  # fmt: skip
        assert [list(sequence.output) for sequence in theirs] == peeked, "guessing changes nothing"
        taken = check_at_once(device, logits, list(map(CheckedRows, ours, starts, guesses)))
        one_by_one(logits, list(map(CheckedRows, theirs, starts, guesses)), taken)
        assert [sequence.output for sequence in ours] == [sequence.output for sequence in theirs]
        if generator.random() < 0.3:
            plain = alike_logits(len(ours), 100 + number)
            for sequences, each in ((ours, device), (theirs, HostSampler())):
                tokens = each.choose_tokens(plain, sequences).tolist()
                for sequence, token in zip(sequences, tokens, strict=True):
                    sequence.output.append(token)
            assert [sequence.output for sequence in ours] == [sequence.output for sequence in theirs]


def alike_logits(rows: int, seed: int) -> torch.Tensor:
    """The same few tokens are likely in every row, so that it matters which were chosen before."""
    return random_logits(1, 7) + random_logits(rows, seed, scale=0.2)


def guess_some(logits: torch.Tensor, sequence: Sequence, count: int, luck: float, generator: Any) -> tuple[int, ...]:
    """What comes next, as far as luck goes."""
    known, host, guesses = len(sequence.output), HostSampler(), []
    twin = build_sequence(list(sequence.output), choice=sequence.choice)
    twin.sampler_state = SamplingState(sequence.sampler_state.params, frozenset([2]))
    for place in range(count):
        token = int(host.choose_tokens(logits[place : place + 1], [twin])[0])
        guesses.append(token if generator.random() < luck else generator.randrange(VOCAB))
        twin.output.append(guesses[-1])
    assert len(sequence.output) == known
    return tuple(guesses)


def test_checking_guesses_needs_no_new_parameters() -> None:
    device = sampler()
    sequences = [build_sequence(choice=row, frequency_penalty=0.2, temperature=0.0) for row in range(3)]
    step(device, sequences)
    for number in range(5):
        logits = random_logits(12, number)
        assert check_at_once(device, logits, [CheckedRows(s, 4 * i, (1, 2, 3)) for i, s in enumerate(sequences)])
        step(device, sequences)
    assert device.num_rebuilt == 1


def test_a_minimum_length_that_ends_among_the_guesses() -> None:
    device, sequence = sampler(), build_sequence(temperature=0.0, min_tokens=2)
    logits = torch.zeros(4, VOCAB)
    logits[:, 2] = 9.0  # a stop token
    assert device.choose_checked(logits, [CheckedRows(sequence, 0, (0, 0, 2))]).tolist() == [0, 0, 2, 2]


BOTH = [pytest.param(HostSampler(), id="host"), pytest.param(DeviceSampler(VOCAB, CPU), id="device")]
GREEDY = [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}, {"temperature": 0.0}, {"top_k": 1, "temperature": 2.0}]


def tied_logits(rows: int, seed: int, levels: float = 1.0) -> torch.Tensor:
    """Rounded to few values, zeros of both signs among them: nearly every rank has equals."""
    logits = random_logits(rows, seed, scale=levels).round()
    logits[:, ::7] = logits[:, ::7].abs() * -1.0  # -0.0 equals 0.0
    return logits


@pytest.mark.parametrize("each", BOTH)
@pytest.mark.parametrize("params", GREEDY, ids=str)
def test_what_leaves_one_token_is_greedy_also_among_equals(each: Any, params: dict[str, Any]) -> None:
    logits = torch.cat([tied_logits(60, 1), torch.zeros(1, VOCAB), -torch.zeros(1, VOCAB)])
    sequences = [build_sequence([0] * position, **params) for position in range(len(logits))]
    assert each.choose_tokens(logits, sequences).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("each", BOTH)
@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, [5, 9]),
        ({"top_k": 3}, [5, 9, 20]),
        ({"top_k": 5}, [5, 9, 20, 0, 1]),
        ({"top_p": 1e-6}, [5]),
        ({"top_p": 0.1}, [5]),
        ({"top_p": 0.5}, [5, 9]),
        ({"top_k": 4, "top_p": 0.7}, [5, 9, 20]),
        ({"top_k": 300, "top_p": 0.7501}, [5, 9, 20, 0]),
        ({"top_k": 4, "min_p": 0.9}, [5, 9, 20]),
        ({"top_p": 0.1, "min_p": 0.0, "top_k": 300}, [5]),
    ],
    ids=str,
)
def test_of_equals_the_lowest_ids_are_kept(each: Any, params: dict[str, Any], kept: list[int]) -> None:
    """Three equals hold three quarters of the weight, the other 597 the rest, all alike."""
    logits = torch.full((1, VOCAB), math.log(1 / 597))
    logits[0, [20, 9, 5]] = 0.0
    if params.get("top_k") == 300:  # of those 597 only 297 count; weight as before
        logits[0, logits[0] < 0] = math.log(1 / 297)
    sequences = [build_sequence([0] * position, **params) for position in range(150)]
    tokens = each.choose_tokens(logits.expand(150, -1).clone(), sequences).tolist()
    assert set(tokens) - set(kept) == set()
    likely = {token for token in kept if token in {5, 9, 20}}
    assert set(tokens) >= likely


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    levels=st.sampled_from([0.3, 1.0, 3.0]),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 17, 255, 256, 257, 400, VOCAB]),
    top_p=st.sampled_from([1.0, 1e-9, 0.3, 0.5, 0.9, 0.99]),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 1.0]),
)
def test_both_samplers_agree_among_equals(
    seed: int, levels: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = tied_logits(6, seed, levels)
    params = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    sequences = [build_sequence([0] * row, seed=seed, **params) for row in range(6)]
    ours, theirs = (each.choose_tokens(logits, sequences).tolist() for each in (sampler(), HostSampler()))
    assert ours == theirs
    if 0 < top_k <= VOCAB:
        ranked = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k].tolist()
        assert all(token in row for token, row in zip(ours, ranked, strict=True))


@pytest.mark.parametrize("each", BOTH)
@pytest.mark.parametrize("num_top", [1, 2, 20, 30])
def test_logprobs_name_the_lowest_of_equals_first(each: Any, num_top: int) -> None:
    logits = torch.cat([tied_logits(20, 3), torch.zeros(1, VOCAB)])
    sequences = [build_sequence(num_logprobs=num_top, temperature=0.0) for _ in logits]
    tokens = each.choose_tokens(logits, sequences).tolist()
    logprobs = each.compute_logprobs(logits, sequences, tokens)
    ranked = logits.sort(dim=-1, descending=True, stable=True).indices[:, :num_top].tolist()
    for row, token in enumerate(tokens):
        assert [candidate for candidate, _ in logprobs[row].top] == ranked[row]
        assert logprobs[row].top[0] == (token, logprobs[row].logprob)


def test_parameters_are_built_when_the_batch_changes_only() -> None:
    device = sampler()
    sequences = [build_sequence(choice=row, frequency_penalty=0.1 * row) for row in range(3)]
    for _ in range(6):
        step(device, sequences)
    assert device.num_rebuilt == 1
    step(device, sequences[:2])
    assert device.num_rebuilt == 2
    step(device, [*sequences[:2], build_sequence(min_tokens=2)])
    assert device.num_rebuilt == 3


def step(device: Any, sequences: list[Sequence], seed: int = 1) -> list[int]:
    tokens = device.choose_tokens(random_logits(len(sequences), seed, scale=0.5), sequences).tolist()
    for sequence, token in zip(sequences, tokens, strict=True):
        sequence.output.append(token)
    return tokens


def test_the_minimum_length_ends_with_one_rebuild() -> None:
    device, sequence = sampler(), build_sequence(temperature=0.0, min_tokens=3)
    logits = torch.zeros(1, VOCAB)
    logits[0, 2] = 9.0  # a stop token
    for count in range(6):
        token = device.choose_tokens(logits, [sequence]).item()
        assert (token == 2) == (count >= 3)
        sequence.output.append(token)
    assert device.num_rebuilt == 2


def test_counts_survive_leaving_the_batch_before_the_host_knows_the_tokens() -> None:
    params = {"temperature": 0.0, "frequency_penalty": 0.9}
    expected = build_sequence(**params)
    host = HostSampler()
    for number in range(8):
        step(host, [expected], number)
    device, mine, other = sampler(), build_sequence(**params), build_sequence(presence_penalty=1.0)
    pending: list[int] = []
    for number in range(8):
        mine.num_planned = mine.num_prompt + number  # chosen, but not appended: one step ahead
        batch = [mine, other] if number % 3 else [mine]
        logits = random_logits(2, number, scale=0.5)[: len(batch)]
        logits[0] = random_logits(1, number, scale=0.5)[0]
        pending.append(int(device.choose_tokens(logits, batch)[0]))
    assert pending == expected.output


def test_grammars_and_impossible_rows() -> None:
    device = sampler()
    logits = random_logits(4)
    logits[1, 7] = torch.nan
    tokens = device.choose_tokens(
        logits, [Forbidding.row([0b1001]), build_sequence(), Forbidding.row(), build_sequence(temperature=0.0)]
    ).tolist()
    assert tokens[0] in {0, 3}
    assert tokens[1:3] == [NO_TOKEN] * 2
    assert tokens[3] == int(logits[3].argmax())


@pytest.mark.parametrize("num_top", [0, 3, 30])
def test_logprobs_are_those_of_the_host(num_top: int) -> None:
    logits = random_logits(3)
    sequences = [build_sequence(num_logprobs=num_top), build_sequence(), build_sequence(num_logprobs=1)]
    ours, theirs = (each.compute_logprobs(logits, sequences, [4, 5, 6]) for each in (sampler(), HostSampler()))
    assert ours.keys() == theirs.keys() == {0, 2}
    for row, logprob in ours.items():
        assert logprob.token_id == theirs[row].token_id
        assert logprob.logprob == pytest.approx(theirs[row].logprob, abs=1e-5)
        assert [token for token, _ in logprob.top] == [token for token, _ in theirs[row].top]
