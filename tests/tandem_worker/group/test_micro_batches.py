"""Pieces of a step, and steps as bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tandem_worker.engine.execute.batch import BatchBuilder, StepInput
from tandem_worker.engine.schedule.host_cache import Moves
from tandem_worker.group.control.wire import (
    HeadCall,
    decode_head_order,
    decode_moves,
    decode_step,
    encode_head_order,
    encode_moves,
    encode_step,
)
from tandem_worker.group.micro_batches import count_micro_batches, split_step

BLOCK = 4
WIDTH = 32


@st.composite
def steps(draw: st.DrawFn) -> StepInput:
    """Decodes, then prompt chunks that begin at block boundaries; logits of whatever tokens."""
    decodes = draw(st.lists(st.integers(1, 100), max_size=6))
    chunks = draw(st.lists(st.tuples(st.integers(0, 10), st.integers(1, 70)), min_size=0 if decodes else 1, max_size=4))
    widths = [min(draw(st.integers(1, 6)), length) for length in decodes]  # newest tokens, and guesses behind them
    query = widths + [length for _, length in chunks]
    context = decodes + [start * BLOCK + length for start, length in chunks]
    total = sum(query)
    table = np.arange(1, len(query) * WIDTH + 1).reshape(len(query), WIDTH)
    return StepInput(
        copies=np.array([[3, 4]]),
        token_ids=np.arange(total) % 89,
        rows=np.array(draw(st.permutations(range(len(query))))),
        query_lens=np.array(query),
        context_lens=np.array(context),
        logits_rows=np.array(sorted(draw(st.sets(st.integers(0, total - 1)))), dtype=np.int64),
        table_runs=np.array([[row, 0, WIDTH] for row in range(len(query))]),
        table_values=table.reshape(-1),
        num_decodes=len(decodes),
    )


def builder() -> BatchBuilder:
    return BatchBuilder(max_rows=16, max_blocks=WIDTH, block_size=BLOCK, device=torch.device("cpu"))


@given(step=steps(), count=st.integers(1, 6))
def test_pieces_one_after_another_are_the_step(step: StepInput, count: int) -> None:
    whole, build = builder().assemble(step), builder()
    pieces = split_step(step, count, BLOCK)
    batches = [build.assemble(piece) for piece in pieces]
    assert len(pieces) <= count
    for field in ("token_ids", "positions", "slot_mapping"):
        assert torch.equal(torch.cat([getattr(batch, field) for batch in batches]), getattr(whole, field))
    wanted = torch.cat([batch.token_ids[batch.logits_rows] for batch in batches])
    assert torch.equal(wanted, whole.token_ids[whole.logits_rows])
    assert all(len(piece.token_ids) for piece in pieces)
    assert sum(len(piece.copies) for piece in pieces) == 1
    decoded = [sum(batch.query_lens_host[: batch.num_decodes]) for batch in (*batches, whole)]
    assert sum(decoded[:-1]) == decoded[-1]
    assert sum(batch.num_decodes for batch in batches) == whole.num_decodes, "a decode was cut from its guesses"
    for batch in batches:
        assert batch.context_lens_host == tuple(int(batch.positions[end - 1]) + 1 for end in batch.query_start[1:])


@given(step=steps())
def test_a_step_survives_the_wire(step: StepInput) -> None:
    again = decode_step(encode_step(step))
    for field in StepInput.__slots__:
        assert np.array_equal(getattr(again, field), getattr(step, field))
        assert field == "num_decodes" or getattr(again, field).dtype == np.int64


def test_a_step_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(ValueError, match="does not have the announced"):
        decode_step(np.array([1, 2, 3, 4, 5, 6, 7, 8, 9], dtype=np.int32).tobytes())


PAIRS = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1)), max_size=5)


@given(out=PAIRS, into=PAIRS, settle=st.booleans())
def test_copies_to_host_memory_survive_the_wire(
    out: list[tuple[int, int]], into: list[tuple[int, int]], settle: bool
) -> None:
    moves = Moves(out=tuple(out), into=tuple(into))
    assert decode_moves(encode_moves(moves, settle=settle)) == (moves, settle)


@pytest.mark.parametrize("numbers", [[], [0], [0, 1], [0, 2, 1, 1], [0, -1, 1, 1], [1, 0, 5]])
def test_what_are_no_copies_is_refused(numbers: list[int]) -> None:
    with pytest.raises(ValueError, match="are no copies"):
        decode_moves(np.array(numbers, dtype=np.int32).tobytes())


@pytest.mark.parametrize(("tokens", "stages", "count"), [(2048, 1, 1), (16, 4, 1), (200, 2, 3), (2048, 2, 4)])
def test_small_steps_stay_whole(tokens: int, stages: int, count: int) -> None:
    assert count_micro_batches(tokens, stages) == count


@given(
    call=st.sampled_from(HeadCall),
    lists=st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=6), max_size=5),
)
def test_an_order_about_a_head_survives_the_wire(call: HeadCall, lists: list[list[int]]) -> None:
    assert decode_head_order(encode_head_order(call, *lists)) == (call, tuple(lists))


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=12))
def test_what_is_no_order_about_a_head_is_refused(numbers: list[int]) -> None:
    data = np.array(numbers, dtype=np.int32).tobytes()
    try:
        order = decode_head_order(data)
    except ValueError:
        return
    assert encode_head_order(order.call, *order.lists) == data
