"""What comes back of a plan: deltas to choices, and the failures that count."""

from __future__ import annotations

from typing import Any

import pytest
from tandem_worker.engine.schedule.params import FinishReason, GenerationRequest, SamplingParams, TokenDelta
from tandem_worker.server.answer.answerer import AnswerProgress, Plan
from tandem_worker.server.text.choice import Choice
from tandem_worker.server.wire.http import ServiceError


class Letters:
    """A detokenizer: token 1 is a, 2 is b, and so on."""

    def feed(self, token_id: int) -> str:
        return chr(96 + token_id)

    def flush(self) -> str:
        return ""


def begin(n: int) -> AnswerProgress:
    request = GenerationRequest(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=9), n=n)
    unused: Any = None
    choices = [Choice(index, Letters(), stops=("c",)) for index in range(n)]  # type: ignore[arg-type]
    return AnswerProgress(Plan(requests=[request], choices=choices, encoder=unused, stream=False, include_usage=False))


def said(choice: int, *token_ids: int) -> TokenDelta:
    return TokenDelta(request_id="r", choice=choice, token_ids=token_ids)


def failed(choice: int) -> TokenDelta:
    return TokenDelta(request_id="r", choice=choice, finish_reason=FinishReason.ERROR, error="the grammar failed")


@pytest.mark.parametrize("together", [True, False])
def test_what_fails_behind_a_stop_string_is_nobodys_failure(together: bool) -> None:
    """A step with guesses goes several tokens beyond the string, and a grammar may refuse one of those."""
    progress = begin(2)
    deltas = [said(0, 1, 3, 1), failed(0)]
    for part in [deltas] if together else [[delta] for delta in deltas]:
        progress.feed(part)
    assert progress.choices_of(0)[0].finish == "stop"
    progress.feed([said(1, 1, 2)])
    with pytest.raises(ServiceError, match="the grammar failed"):
        progress.feed([failed(1)])
