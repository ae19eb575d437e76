"""The tokens that requests hold on their endpoints. Every method is safe to call again."""

from __future__ import annotations

from tandem_gateway.scheduling.conversion import Conversion
from tandem_gateway.scheduling.endpoint import Endpoint
from tandem_gateway.scheduling.shared import Holding
from tandem_gateway.scheduling.speed import SHORT_TOKENS

_TOKENS_PER_STEP = 32
"""Prompt tokens computed in the time of one decode step: splits the time of an answer in one piece."""
_PATIENT_TOKENS = 4 * _TOKENS_PER_STEP
"""The same where it only matters not to be impatient: answers may be several times longer than expected."""
_UNKNOWN_SECONDS = 60.0
"""Patience with a worker of which nothing is known."""
SENSIBLE_SECONDS = 1.0
SENSIBLE_FACTOR = 2.0
"""A client has waited for long enough after this long, and this many times what its answer should take."""


class Reservation:
    """What one request holds on its prefill and its decode endpoint."""

    __slots__ = (
        "_converted", "_decode", "_decode_left", "_open", "_output", "_owing", "_part", "_prefill", "_prefill_tokens",
        "_prefilling", "_pulls",
        "copy", "expected", "holder", "patience", "since", "work",
    )  # fmt: skip

    def __init__(
        self,
        decode: Endpoint,
        prefill: Endpoint,
        prefill_tokens: int,
        decode_tokens: int,
        now: float,
        stream: bool = True,
        conversion: Conversion | None = None,
        pulls: bool = False,
    ) -> None:
        """`prefill` is `decode` itself where that worker computes the prompt: for want of another one, or because
        prefill workers are behind, as `conversion` says. `pulls`: it is to bring a part of it."""
        self._decode = decode
        self._prefill = prefill
        self._prefill_tokens = self.work = work = prefill_tokens
        self._decode_left = self._output = decode_tokens
        self._part = 0.0
        """Part of a token that has come, and is not counted yet."""
        self._open = self._prefilling = self._owing = True
        self._pulls = pulls
        """How long its prompt takes says nothing of the worker's speed: whoever has the rest may not give it."""
        self.since = now
        self.holder: object = None
        """The request that it belongs to."""
        self.copy: Holding | None = None
        """What the decode endpoint holds of the prompt, in use until the request ends."""
        if prefill.prefill_tokens or prefill.told:
            self.work = work = prefill_tokens + prefill.find_queue(now)
        """Prompt tokens to compute before its first token, its own included."""
        if not prefill.owing:
            prefill.working_since = now
        decode.requests += 1
        decode.owing[self] = None
        self._converted = False
        """How long its prompt takes says nothing of the worker's speed: it is held back for streams beside it."""
        own = None
        if conversion is not None and conversion.converted:
            self._converted, own = True, conversion.decode_seconds
            decode.own.begin(prefill_tokens, now)
        if prefill is decode:
            decode.charge(prefill_tokens, decode_tokens)
        else:
            decode.charge(0, decode_tokens)
            prefill.charge(prefill_tokens, 0)
            prefill.requests += 1
            prefill.owing[self] = None
        self.expected = expected = prefill.speed.predict(work) if own is None else own
        """Seconds until its first token, or None while too little is known."""
        if not stream:  # how long an answer in one piece is, nobody knows before it is there
            expected = prefill.speed.predict(work + _PATIENT_TOKENS * decode_tokens)
            expected = max(expected or 0.0, _UNKNOWN_SECONDS)
        self.patience = _UNKNOWN_SECONDS if expected is None else expected
        """Seconds that the first sign of its answer should take."""

    @property
    def owing(self) -> bool:
        """It is under way, and its worker has shown nothing of its answer."""
        return self._owing

    def first_token(self, now: float, *, last: bool = False) -> None:
        """The prompt is computed: its prefill tokens are worked off. `last`: the answer has ended with it, and
        `release` follows, which takes off all at once."""
        if self._prefilling:
            prefill = self._prefill
            if self._converted:
                self._learn_own(now)
            elif not self._pulls:
                prefill.speed.observe(self.work, now - self.since)
            prefill.working_since = now
            if not last:
                self._end_prefill()
        if self._owing:
            self._end_owing(now)

    def _learn_own(self, now: float) -> None:
        """A prompt that was converted is computed."""
        if self.expected is not None and self._prefill_tokens >= SHORT_TOKENS:
            self._decode.own.learn(self.expected, now - self.since, now)

    def assume(self, now: float) -> None:
        """An answer in one piece shows no sign of life: its prompt counts for as long as it should take."""
        speed = self._prefill.speed.value
        takes = self.expected if self._converted else self.work / speed if speed else None
        if self._prefilling and takes is not None and now - self.since > takes:
            self._prefill.working_since = now
            self._end_prefill()

    def complete(self, now: float) -> None:
        """An answer in one piece is there, and `release` follows. What its prompt took is a guess from the whole."""
        if self._owing and self._prefill_tokens >= SHORT_TOKENS and not (self._converted or self._pulls):
            self._prefill.speed.observe(self.work + _TOKENS_PER_STEP * self._output, now - self.since)
        if self._owing:
            self._end_owing(now)

    def progress(self, events: int, now: float) -> None:
        """So many more events of its stream are here, of as many tokens as they carry from this worker. One token stays
        expected until the end: the request still occupies the worker."""
        self._decode.hear(now)
        exact = events * self._decode.tokens_per_event + self._part
        tokens = int(exact)
        self._part = exact - tokens
        done = min(tokens, self._decode_left - 1)
        if done > 0:
            self._decode_left -= done
            self._decode.charge(0, -done)

    def desert(self, now: float) -> None:
        """The client leaves. That says something of its workers only where it had waited for longer than an answer
        takes, and nobody had any sign of life from them in that time.
        """
        if not self._owing:
            return
        for endpoint in (self._decode, self._prefill):
            waited = now - max(self.since, endpoint.quiet_since)
            if waited >= max(SENSIBLE_SECONDS, SENSIBLE_FACTOR * max(self.patience, endpoint.gap)):
                endpoint.deserted += 1
            if self._prefill is self._decode:
                break

    def release(self) -> None:
        """The request ended, whichever way."""
        if not self._open:
            return
        self._open = False
        decode, prefill = self._decode, self._prefill
        if self._owing:
            self._stop_owing()
        if self._prefilling and prefill is decode:
            self._prefilling = False
            if self._converted:
                decode.own.end(self._prefill_tokens)
            decode.charge(-self._prefill_tokens, -self._decode_left)
        else:
            if self._prefilling:
                self._end_prefill()
            decode.charge(0, -self._decode_left)
        self._decode_left = 0
        decode.requests -= 1
        copy = self.copy
        if copy is not None:  # in use until the worker last showed a sign of life
            copy.written = decode.kv_written
            copy.end_use(self.since, decode.heard_at)
        if decode.health.probe is self:
            decode.retry_probe()
        if prefill is not decode and prefill.health.probe is self:
            prefill.retry_probe()

    def _end_prefill(self) -> None:
        self._prefilling = False
        if self._converted:
            self._decode.own.end(self._prefill_tokens)
        self._prefill.charge(-self._prefill_tokens, 0)
        if self._prefill is not self._decode:
            self._prefill.requests -= 1

    def _end_owing(self, now: float) -> None:
        decode, prefill = self._decode, self._prefill
        decode.hear(now)
        self._owing = False  # inlined `_stop_owing`
        del decode.owing[self]
        if prefill is not decode:
            prefill.hear(now)
            del prefill.owing[self]

    def _stop_owing(self) -> None:
        self._owing = False
        del self._decode.owing[self]
        if self._prefill is not self._decode:
            del self._prefill.owing[self]
