"""Encoders that have a state go on to the byte, wherever an answer is cut and however its tokens were grouped. Without
a model: what is said is given.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import re
from collections.abc import Coroutine, Generator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_worker.engine.errors import RequestError
from tandem_worker.engine.schedule.params import (
    FinishReason,
    GenerationRequest,
    SamplingParams,
    TokenDelta,
    TokenLogprob,
)
from tandem_worker.server.answer.answerer import Plan
from tandem_worker.server.answer.journal import Journal, Resume, read_journal
from tandem_worker.server.answer.resuming import open_journal, take_up
from tandem_worker.server.dialects.contract import AnswerHead
from tandem_worker.server.dialects.messages.encoder import MessagesEncoder
from tandem_worker.server.dialects.responses import encoder as responses_encoder
from tandem_worker.server.dialects.responses.encoder import ResponsesEncoder
from tandem_worker.server.text.choice import Choice
from tandem_worker.server.text.output import Usage
from tandem_worker.server.text.reasoning import ReasoningParser
from tandem_worker.server.tools.contract import ToolOptions
from tandem_worker.server.tools.formats import HERMES_FORMAT
from tandem_worker.server.wire.pacing import complete

from tests.effort import count_instructions
from tests.tandem_worker.server.dialects.test_translations import PIECES, TABLE, TOKENIZER, read_events

USAGE = Usage(prompt_tokens=3, cached_tokens=2, completion_tokens=9, reasoning_tokens=1)
ANSWERS = st.tuples(
    st.sampled_from(["", "<think>Hm, é.</think>"]),
    st.lists(st.sampled_from([*PIECES, "日本", "stop", "st"]), min_size=1, max_size=5).map("".join),
).map("".join)
CUTS = st.lists(st.integers(0, 400), max_size=20)
VISIBLE = frozenset(map(TOKENIZER.backend_tokenizer.token_to_id, ["<think>", "</think>"]))
Units = list[tuple[bytes, bytes]]


def make_plan(api: str, *, logprobs: bool, stops: tuple[str, ...] = ("stop it",)) -> Plan:
    """As two workers make it of one request."""
    head = AnswerHead(
        id=f"{api}_0123456789abcdef", created=1, model="m", fingerprint="f", service_tier=None, include_usage=False,
        return_token_ids=False, tokens_as_ids=False, with_logprobs=logprobs,
    )  # fmt: skip
    parser = ReasoningParser(HERMES_FORMAT.new_parser(ToolOptions(mode="auto")), inside=False)
    choice = Choice(0, TABLE.new(visible=VISIBLE), stops=stops, parser=parser, answer_id=head.id)
    encoder = ResponsesEncoder(head, TABLE, echo=b'{"tools":[]}') if api == "resp" else MessagesEncoder(head, TABLE)
    request = GenerationRequest(
        request_id="r", prompt_token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=2000, seed=1)
    )
    plan = Plan(requests=[request], choices=[choice], encoder=encoder, stream=True, include_usage=True)
    plan.journal = open_journal(plan)
    return plan


def list_deltas(text: str, cuts: list[int], *, logprobs: bool) -> list[TokenDelta]:
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    borders = sorted({0, *(cut % (len(tokens) + 1) for cut in cuts), len(tokens)})
    told = [
        TokenLogprob(token_id=token, logprob=-0.1 * math.sqrt(number), top=((token + 1, -math.inf), (token, -1 / 3)))
        for number, token in enumerate(tokens)
    ]
    return [
        TokenDelta(
            request_id="r",
            choice=0,
            token_ids=tuple(tokens[begin:end]),
            logprobs=tuple(told[begin:end]) if logprobs else None,
        )
        for begin, end in itertools.pairwise(borders)
    ]


def go_on(plan: Plan, deltas: list[TokenDelta]) -> Units:
    """What the worker writes of `deltas` and the end of the answer."""
    (choice,), encoder, journal = plan.choices, plan.encoder, plan.journal
    assert journal is not None
    units: Units = []
    for delta in deltas:
        choice.feed(delta)
        update = choice.take()
        events = complete(encoder.long_update(0, update))
        units.append((events, journal.update(choice, update, events)))
    choice.feed(TokenDelta(request_id="r", choice=0, finish_reason=FinishReason.STOP))
    events = complete(encoder.long_update(0, choice.take())) + encoder.usage(USAGE)
    # The clock of its end is the only thing that is another one each time.
    return [*units, (re.sub(rb'"completed_at":\d+', b'"completed_at":0', events), b"")]


def begin(plan: Plan) -> tuple[bytes, bytes]:
    events = complete(plan.encoder.opening(0, plan.requests[0].prompt_token_ids))
    assert isinstance(plan.journal, Journal)
    return events, plan.journal.begin(0, 2, events)


def read(plan: Plan, lines: list[bytes]) -> Resume:
    assert plan.journal is not None
    return complete(read_journal(plan.journal.head.to_json().encode() + b"\n" + b"".join(lines)))


def take_over(plan: Plan, lines: list[bytes]) -> None:
    asyncio.run(take_up(plan, read(plan, lines), vocab_size=len(TOKENIZER)))


class Turns:
    """A coroutine, and what each of its turns of the event loop costs in instructions."""

    def __init__(self, work: Coroutine[Any, Any, None]) -> None:
        self._work = work
        self.costs: list[int] = []

    def __await__(self) -> Generator[Any, Any, None]:
        awaited: list[Any] = []

        def advance() -> None:
            with contextlib.suppress(StopIteration):
                awaited.append(self._work.send(None))

        while True:
            self.costs.append(count_instructions(advance))
            if not awaited:
                return
            yield awaited.pop()

    async def run(self) -> None:
        await self


@pytest.mark.parametrize("bound", [1 << 20, 300], ids=["all logprobs", "few logprobs"])
@pytest.mark.parametrize(("api", "logprobs"), [("resp", False), ("resp", True), ("msg", False)])
@given(text=ANSWERS, cuts=CUTS)
@settings(max_examples=40, deadline=None)
def test_every_byte_after_a_cut_is_that_of_the_first_worker(
    text: str, cuts: list[int], api: str, logprobs: bool, bound: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(responses_encoder, "MAX_REPEATED_BYTES", bound)
        plan = make_plan(api, logprobs=logprobs)
        deltas = list_deltas(text, cuts, logprobs=logprobs)
        opening = begin(plan)
        units = go_on(plan, deltas)
        lines = [number for number, (_, line) in enumerate(units) if line]
        for place in [-1, *lines]:
            # Tokens after the last line, which told nothing, are computed again.
            second = make_plan(api, logprobs=logprobs)
            take_over(second, [opening[1], *(line for _, line in units[: place + 1])])
            rest = go_on(second, deltas[place + 1 :])
            assert b"".join(events for events, _ in rest) == b"".join(events for events, _ in units[place + 1 :])
            assert [line for _, line in rest] == [line for _, line in units[place + 1 :]]


def test_parts_of_a_character_have_their_logprobs_with_it() -> None:
    """However its tokens are grouped, as an answer in one piece has them."""
    for cuts in ([], [*range(400)]):
        plan = make_plan("resp", logprobs=True, stops=())
        written = b"".join(events for events, _ in go_on(plan, list_deltas("a日b", cuts, logprobs=True)))
        deltas = [event for event in read_events(written) if event["type"].endswith(".delta")]
        told = [entry["bytes"] for event in deltas for entry in event["logprobs"]]
        assert bytes(itertools.chain.from_iterable(told)).decode() == "a日b"
        assert len(deltas) == (3 if cuts else 1)


@pytest.mark.parametrize("api", ["resp", "msg"])
def test_what_going_on_costs_grows_with_the_stream_alone(api: str) -> None:
    """Items, texts and checksums are not gone through anew for each line."""

    def cost(num_tokens: int) -> int:
        plan = make_plan(api, logprobs=False)
        opening = begin(plan)
        text = "some words " * num_tokens
        deltas = [
            TokenDelta(request_id="r", choice=0, token_ids=(token,)) for token in TOKENIZER.encode(text)[:num_tokens]
        ]
        units = go_on(plan, deltas)
        second = make_plan(api, logprobs=False)
        return count_instructions(lambda: take_over(second, [opening[1], *(line for _, line in units)]))

    first, second = cost(500), cost(1000)
    assert second < 2.1 * first
    assert second < 1000 * 1500


@pytest.mark.parametrize("size", [1, 30])
def test_going_on_takes_turns_however_much_one_line_says(size: int) -> None:
    """A client that reads slowly, or an engine that has several tokens in a step, makes lines of many tokens."""

    def cost(num_tokens: int) -> int:
        plan = make_plan("resp", logprobs=True)
        opening = begin(plan)
        text = "some words " * num_tokens
        tokens = TOKENIZER.encode(text, add_special_tokens=False)[:num_tokens]
        top = tuple((token, -1.0) for token in range(20))
        deltas = [
            TokenDelta(
                request_id="r",
                choice=0,
                token_ids=tuple(part),
                logprobs=tuple(TokenLogprob(token_id=token, logprob=-1.0, top=top) for token in part),
            )
            for part in (tokens[start : start + size] for start in range(0, num_tokens, size))
        ]
        lines = [opening[1], *(line for _, line in go_on(plan, deltas))]
        second = make_plan("resp", logprobs=True)
        turns = Turns(take_up(second, read(second, lines), vocab_size=len(TOKENIZER)))
        asyncio.run(turns.run())
        return max(turns.costs)

    assert cost(900) < 3 * cost(60)


TOP = ",".join(f"[{token},-1.5]" for token in range(20))


@pytest.mark.parametrize(
    "line", [": t 0 1234", f": t 0 {','.join(['12'] * 500)}", f": e 0 1 7 [] [{','.join([f'[1,-1.0,[{TOP}]]'] * 10)}]"],
    ids=["tokens", "many tokens", "logprobs"],
)  # fmt: skip
def test_a_journal_is_read_in_turns_whatever_its_lines_say(line: str) -> None:
    head = make_plan("resp", logprobs=True).journal
    assert head is not None

    def cost(size: int) -> int:
        lines = b"\n".join([line.encode()] * (size // len(line)))
        steps = read_journal(head.head.to_json().encode() + b"\n" + lines)
        costs: list[int] = []
        resume = None
        while resume is None:
            try:
                costs.append(count_instructions(lambda: next(steps)))
            except StopIteration as end:
                resume = end.value
        assert len(resume.get(0).token_ids) == (size // len(line)) * (line.split(" ")[3].count(",") + 1)
        return max(costs, default=0)

    least = cost(40_000)
    assert 0 < cost(400_000) < 1.5 * least


@pytest.mark.parametrize("token", ["-1", str(2**32), str(2**63), "1.5", '"1"', "null"])
def test_a_logprob_of_no_token_is_refused_as_what_it_is(token: str) -> None:
    """Not as a failure of the worker that reads it."""
    plan = make_plan("resp", logprobs=True)
    opening = begin(plan)
    for logprob in (f"[{token},-1.0,[]]", f"[1,-1.0,[[{token},-1.0]]]"):
        withheld = "[0," + logprob[1:]
        for line in (f": e 0 1 - [] [{logprob}]\n", f": e 0 1 - [{withheld}] []\n", f": t 0 1 [{withheld}]\n"):
            with pytest.raises(RequestError, match="no token") as caught:
                take_over(make_plan("resp", logprobs=True), [opening[1], line.encode()])
            assert caught.value.code == "invalid_journal"
