"""One choice of a request: from its token deltas to the updates that are sent. Pure.

What has been released after a token depends only on the tokens up to it, never on how they were grouped into deltas
or updates: a stream can therefore be continued elsewhere by feeding the same tokens again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence

from tandem_worker.engine.schedule.params import FinishReason, TokenDelta, TokenLogprob
from tandem_worker.server.text.detokenizer import Detokenizer
from tandem_worker.server.text.output import Finish, Parsed, TextParser, ToolDelta, Update, derive_id
from tandem_worker.server.text.prediction import PredictionTally
from tandem_worker.server.text.stops import StopMatcher
from tandem_worker.server.wire.pacing import Steps

REPLAY_TOKENS = 512
"""So many are replayed before others have their turn: a few milliseconds."""


class Choice:
    """State of one choice. `finish` is set when nothing more will come; later deltas are ignored."""

    __slots__ = (
        "_answer_id",
        "_called_tools",
        "_detokenizer",
        "_every_logprob",
        "_include_stop",
        "_length",
        "_min_tokens",
        "_parser",
        "_prediction",
        "_released",
        "_stop_token_ids",
        "_stops",
        "_update",
        "_waiting",
        "accepted_prediction_tokens",
        "completion_tokens",
        "finish",
        "index",
        "num_predicted",
        "reasoning_tokens",
    )

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        *,
        stops: Sequence[str] = (),
        stop_token_ids: Collection[int] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        parser: TextParser | None = None,
        every_logprob: bool = False,
        answer_id: str = "",
        prediction: PredictionTally | None = None,
    ) -> None:
        """`include_stop`: the stop string, or the text of the stop token, is part of the answer. `every_logprob`: there
        is one for each of `Update.all_token_ids`, those that ended the choice among them. Ids of calls are made of
        `answer_id`.
        """
        self.index = index
        self.finish: Finish | None = None
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self.num_predicted = 0 if prediction is None else prediction.num_tokens
        """Tokens that the client has predicted."""
        self.accepted_prediction_tokens = 0
        self._prediction = prediction
        self._detokenizer = detokenizer
        self._stops = StopMatcher(stops, keep=include_stop) if stops else None
        self._stop_token_ids = stop_token_ids
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._parser = parser
        self._every_logprob = every_logprob
        self._answer_id = answer_id
        self._called_tools = False
        self._update = Update()
        self._length = 0  # characters produced by the detokenizer
        self._released = 0  # characters that left the stop matcher
        self._waiting: list[tuple[int, TokenLogprob]] = []  # with the offset of their text

    def feed(self, delta: TokenDelta) -> None:
        """Take in new tokens. The delta's `finish_reason` must not be ABORT or ERROR."""
        if self.finish is not None:
            return
        logprobs = delta.logprobs
        for position, token_id in enumerate(delta.token_ids):
            self._token(token_id, logprobs[position] if logprobs is not None else None)
            if self.finish is not None:
                return
        if delta.finish_reason is not None:
            if delta.stop_token_id is not None:
                self.completion_tokens += 1
            self._end(delta.finish_reason, delta.stop_token_id, delta.stop_logprob)

    def take(self) -> Update:
        """What is new since the last call."""
        update, self._update = self._update, Update()
        return update

    @property
    def waiting(self) -> Sequence[tuple[int, TokenLogprob]]:
        """Logprobs of withheld text with its offset: all that a choice has which its tokens do not tell."""
        return self._waiting

    def replay(self, token_ids: Sequence[int], waiting: Iterable[tuple[int, TokenLogprob]]) -> Steps[Update]:
        """Stand where a choice stood elsewhere after these tokens more, with nothing to tell; `waiting` was its own.
        Returns what it had to tell of them, without logprobs.
        """
        for start in range(0, len(token_ids), REPLAY_TOKENS):
            if start:
                yield
            for token_id in token_ids[start : start + REPLAY_TOKENS]:
                if self.finish is None:
                    self._token(token_id, None)
        self._waiting = list(waiting)
        return self.take()

    def close_ended(self, completion_tokens: int, reasoning_tokens: int, accepted: int = 0) -> None:
        """It has ended elsewhere, and its end was told; `accepted` of its tokens were predicted."""
        self.finish = "stop"
        self.accepted_prediction_tokens = accepted
        self.completion_tokens = completion_tokens
        self.reasoning_tokens = reasoning_tokens

    def close_empty(self) -> None:
        """End without any output: only the prompt was to be scored."""
        self.finish = self._update.finish = "length"

    def _token(self, token_id: int, logprob: TokenLogprob | None) -> None:
        update = self._update
        self.completion_tokens += 1
        update.token_ids.append(token_id)
        if self._prediction is not None:
            self._prediction.feed(token_id)
            self.accepted_prediction_tokens = self._prediction.accepted
        text = self._detokenizer.feed(token_id)
        if logprob is not None:
            self._waiting.append((self._length, logprob))
        self._length += len(text)
        stopped = False
        if self._stops is not None and self.completion_tokens > self._min_tokens:
            text = self._stops.feed(text)
            stopped = self._stops.stopped
        self._release(text)
        parser = self._parser
        if parser is not None and parser.reasoning:
            self.reasoning_tokens += 1
        if stopped:
            self._close("stop", ended_by_text=True)
        elif parser is not None and parser.complete:
            self._close("stop", ended_by_text=False)
        if self._waiting:
            self._release_logprobs(everything=self._stops is None)

    def _release(self, text: str) -> None:
        """Hand on text that is certain to be part of the answer."""
        if not text:
            return
        self._released += len(text)
        if self._parser is None:
            self._update.content += text
        else:
            self._add(self._parser.feed(text))

    def _add(self, parsed: Parsed) -> None:
        update = self._update
        update.content += parsed.content
        update.reasoning += parsed.reasoning
        if parsed.tools:
            update.tools += map(self._identify, parsed.tools)
            self._called_tools = True

    def _identify(self, tool: ToolDelta) -> ToolDelta:
        if tool.name is None or tool.id is not None:
            return tool
        return dataclasses.replace(
            tool, id=derive_id("call_", self._answer_id, f"call {self.index} {tool.index}", size=12)
        )

    def _release_logprobs(self, *, everything: bool) -> None:
        update = self._update
        ready = 0
        for offset, logprob in self._waiting:
            if not everything and offset >= self._released:
                break
            update.logprobs.append(logprob)
            update.logprob_offsets.append(offset)
            ready += 1
        del self._waiting[:ready]

    def _end(self, reason: FinishReason, stop_token_id: int | None, stop_logprob: TokenLogprob | None) -> None:
        rest = ""
        if stop_token_id is not None:
            if self._every_logprob and stop_logprob is not None:
                self._waiting.append((self._length, stop_logprob))
            if self._include_stop:
                rest = self._detokenizer.feed(stop_token_id)
            self._update.end_token = stop_token_id
            if stop_token_id in self._stop_token_ids:
                self._update.stopped_by = stop_token_id
        rest += self._detokenizer.flush()
        self._length += len(rest)
        if self._stops is not None:
            rest = self._stops.feed(rest)
            if self._stops.stopped:
                self._release(rest)
                self._close("stop", ended_by_text=True)
                return
            rest += self._stops.flush()
        self._release(rest)
        self._close("length" if reason is FinishReason.LENGTH else "stop", ended_by_text=False)

    def _close(self, finish: Finish, *, ended_by_text: bool) -> None:
        if self._parser is not None:
            self._add(self._parser.flush())
        if ended_by_text and self._stops is not None:
            self._update.stopped_by = self._stops.matched
        # Tokens of the stop string itself are not part of the answer, nor are their logprobs, unless ids are told too.
        self._release_logprobs(everything=self._every_logprob or not ended_by_text)
        self._waiting.clear()
        self.finish = "tool_calls" if self._called_tools and finish == "stop" else finish
        self._update.finish = self.finish
