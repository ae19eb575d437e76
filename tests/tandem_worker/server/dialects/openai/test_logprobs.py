"""Logprobs of completions."""

from __future__ import annotations

import orjson
from tandem_worker.engine.schedule.params import TokenLogprob
from tandem_worker.server.dialects.openai.logprobs import legacy_logprobs
from tandem_worker.server.wire.pacing import complete


class Letters:
    def token_bytes(self, token_id: int) -> bytes:
        return bytes([97 + token_id])


def test_the_sampled_token_comes_first_and_once() -> None:
    told = [
        TokenLogprob(token_id=3, logprob=-4.0, top=((0, -0.5), (1, -1.0))),
        TokenLogprob(token_id=1, logprob=-1.0, top=((0, -0.5), (1, -1.0))),
    ]
    written = orjson.loads(orjson.dumps(complete(legacy_logprobs(Letters(), told, [3, 1], [0, 1]))))
    assert [list(top.items()) for top in written["top_logprobs"]] == [
        [("d", -4.0), ("a", -0.5), ("b", -1.0)],
        [("b", -1.0), ("a", -0.5)],
    ]
