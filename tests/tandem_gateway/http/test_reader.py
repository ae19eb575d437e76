"""The same requests, however the network cuts them."""

from __future__ import annotations

import random

import pytest
from tandem_gateway.http.connection import SLICE_BYTES
from tandem_gateway.http.reader import RequestReader

from bench.gateway.fuzz_cases import make_name, plan_client, split

MAX_BODY_BYTES = 256 * 1024


def read(pieces: list[bytes]) -> tuple[list[tuple[bytes, str, dict[bytes, bytes], bytes]], int | None]:
    reader = RequestReader(MAX_BODY_BYTES)
    for piece in pieces:
        reader.feed(piece)
    found = [(item.method, item.path, item.headers, item.body) for item in reader.ready]
    return found, reader.refusal.status if reader.refusal else None


@pytest.mark.parametrize("seed", range(20))
def test_any_cuts_give_the_same_requests(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(15):
        plan = plan_client(rng, [make_name(rng) for _ in range(3)])
        data = b"".join(step for step in plan.steps if isinstance(step, bytes))
        slices = [data[start : start + SLICE_BYTES] for start in range(0, len(data), SLICE_BYTES)]
        expected = read(slices)
        for _ in range(3):
            assert (
                read([piece for item in slices for piece in split(rng, item) if isinstance(piece, bytes)]) == expected
            )


def test_the_body_that_is_missing_is_known() -> None:
    reader = RequestReader(MAX_BODY_BYTES)
    reader.feed(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n123")
    assert (reader.missing_bytes, reader.body_bytes) == (7, 3)
    reader.feed(b"4567890")
    assert (reader.missing_bytes, reader.body_bytes, len(reader.ready)) == (0, 0, 1)


def test_nothing_is_read_after_a_refusal() -> None:
    reader = RequestReader(MAX_BODY_BYTES)
    reader.feed(b"nonsense\r\n\r\n")
    reader.feed(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    assert not reader.ready
    assert reader.refusal is not None
