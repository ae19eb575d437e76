"""A choice of a request: what is told of the tokens that end it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_worker.engine.schedule.params import FinishReason, TokenDelta, TokenLogprob
from tandem_worker.server.text.choice import Choice
from tandem_worker.server.text.detokenizer import TokenTable
from tandem_worker.server.text.output import Update

from tests.tandem_worker.server.conftest import byte_level_tokenizer

TABLE = TokenTable(byte_level_tokenizer())
END = 0
A, B, C = (byte_level_tokenizer().backend_tokenizer.token_to_id(letter) for letter in "abc")


def tell(token_ids: Sequence[int], *, ended: bool, stops: Sequence[str], every_logprob: bool) -> Update:
    """What a choice says of these tokens, and of the end token after them where `ended`."""
    choice = Choice(0, TABLE.new(visible=frozenset()), stops=stops, every_logprob=every_logprob)
    for token_id in token_ids:
        choice.feed(
            TokenDelta(
                request_id="r",
                choice=0,
                token_ids=(token_id,),
                logprobs=(TokenLogprob(token_id=token_id, logprob=-1.0),),
            )
        )
    last = TokenDelta(request_id="r", choice=0, finish_reason=FinishReason.LENGTH)
    if ended:
        last.finish_reason, last.stop_token_id = FinishReason.STOP, END
        last.stop_logprob = TokenLogprob(token_id=END, logprob=-2.0)
    choice.feed(last)
    return choice.take()


@given(
    token_ids=st.lists(st.sampled_from([A, B, C]), max_size=12),
    ended=st.booleans(),
    stops=st.lists(st.sampled_from(["a", "ab", "bca", "cc"]), max_size=2),
)
def test_whoever_is_told_the_ids_is_told_the_logprob_of_each(
    token_ids: list[int], ended: bool, stops: list[str]
) -> None:
    update = tell(token_ids, ended=ended, stops=stops, every_logprob=True)
    assert [each.token_id for each in update.logprobs] == update.all_token_ids
    assert update.logprob_offsets == sorted(update.logprob_offsets)
    text = tell(token_ids, ended=ended, stops=stops, every_logprob=False)
    assert text.content == update.content


@pytest.mark.parametrize(("stops", "kept"), [((), [A, B, C]), (("bc",), [A])])
def test_else_logprobs_are_those_of_the_text(stops: tuple[str, ...], kept: list[int]) -> None:
    update = tell([A, B, C], ended=True, stops=stops, every_logprob=False)
    assert [each.token_id for each in update.logprobs] == kept
