from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_api.spans import TraceContext
from tandem_worker.engine.contract import RemotePrefill
from tandem_worker.engine.trace import Hop
from tandem_worker.transfer import protocol
from tandem_worker.transfer.contract import Identity
from tandem_worker.transfer.errors import IntegrityError, TransferError
from tandem_worker.transfer.layout import KVShard, RankAddress
from tandem_worker.transfer.protocol import BlockRange, Done, FrameKind, Header

EVERY_KIND = frozenset(FrameKind)
IDENTITY = Identity(worker="prefill-0", revision="r1", model_digest="abc", layout="bfloat16/16/2x(2,3,16,64)")
SHARDS = [KVShard(first_layer=0, num_layers=1, tp_rank=rank, tp_size=2) for rank in range(2)]
RANKS = tuple(RankAddress(endpoint=f"10.0.0.1:{7000 + rank}", shard=shard) for rank, shard in enumerate(SHARDS))


def split(frame: bytes) -> tuple[Header, bytes]:
    header = protocol.decode_header(frame[: protocol.HEADER_BYTES], EVERY_KIND)
    body = frame[protocol.HEADER_BYTES :]
    assert len(body) == header.length
    protocol.check_body(header, body)
    return header, body


@pytest.mark.parametrize("identity", [IDENTITY, replace(IDENTITY, shard=SHARDS[1], ranks=RANKS)])
def test_hello_round_trip(identity: Identity) -> None:
    header, body = split(protocol.encode_hello(identity))
    assert header.kind is FrameKind.HELLO
    assert protocol.decode_hello(body) == identity


@pytest.mark.parametrize(
    "shard", ["[0, 0, 0, 1]", "[0, 1, 1, 1]", "[-1, 1, 0, 1]", "[0, 1, 0]", "[0, 1e999, 0, 1]", "7"]
)
def test_hello_with_a_shard_that_cannot_be(shard: str) -> None:
    _, body = split(protocol.encode_hello(IDENTITY))
    with pytest.raises(TransferError, match="hello"):
        protocol.decode_hello(body.replace(b'"shard": null', b'"shard": ' + shard.encode()))


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"{}", b"\xff\xfe", b'{"magic": "other", "version": 1}', b"1" * 4096]
)
def test_hello_of_a_stranger(body: bytes) -> None:
    with pytest.raises(TransferError, match="hello"):
        protocol.decode_hello(body)


def test_hello_of_another_version() -> None:
    _, body = split(protocol.encode_hello(IDENTITY))
    ours, theirs = protocol.VERSION, protocol.VERSION + 1
    with pytest.raises(TransferError, match=f"version {theirs}"):
        protocol.decode_hello(body.replace(b'"version": %d' % ours, b'"version": %d' % theirs))


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50),
    request_id=st.text(max_size=40),
    salt=st.text(max_size=40),
    generation=st.integers(0, 2**32 - 1),
    priority=st.integers(-(2**31), 2**31 - 1),
    transfer=st.integers(0, 2**64 - 1),
    held=st.integers(0, 1 << 40),
)
def test_prefill_round_trip(
    tokens: list[int], request_id: str, salt: str, generation: int, priority: int, transfer: int, held: int
) -> None:
    order = RemotePrefill(
        request_id=request_id,
        generation=generation,
        token_ids=tuple(tokens),
        num_cached_tokens=len(tokens) - 1,
        block_ids=(),
        endpoints=(),
        kv_source="10.0.0.7:7000",
        kv_source_tokens=held,
        cache_salt=salt,
        priority=priority,
    )
    header, body = split(protocol.encode_prefill(transfer, order))
    order = replace(order, kv_source_tokens=min(held, len(tokens)))  # nobody has more of it
    assert header.transfer == transfer
    assert protocol.decode_prefill(body) == order
    context = TraceContext("4a" * 16, "ab" * 8)
    _, traced = split(protocol.encode_prefill(transfer, replace(order, hop=Hop(context, "p:7000"))))
    found = protocol.decode_prefill(traced)
    assert found.hop is not None
    assert found.hop.context == context
    assert replace(found, hop=None) == order
    at = traced.index(context.header.encode())
    with pytest.raises(TransferError, match="trace context that is none"):
        protocol.decode_prefill(traced[:at] + b"x" + traced[at + 1 :])


@given(st.binary(max_size=200))
def test_bodies_that_cannot_be_read_raise_nothing_else(body: bytes) -> None:
    for decode in (
        protocol.decode_prefill,
        protocol.decode_hello,
        partial(protocol.decode_done, transfer=7),
        protocol.decode_resend,
        protocol.decode_heartbeat,
        protocol.decode_text,
        protocol.decode_attach,
    ):
        try:
            decode(body)
        except TransferError:
            continue


@given(st.binary(min_size=protocol.HEADER_BYTES, max_size=protocol.HEADER_BYTES))
def test_header_never_promises_more_than_its_kind_may_have(data: bytes) -> None:
    try:
        header = protocol.decode_header(data, EVERY_KIND)
    except TransferError:
        return
    assert header.length <= protocol.MAX_BLOCK_BYTES + (1 << 20)


def test_header_of_a_kind_that_is_not_expected() -> None:
    with pytest.raises(TransferError, match="unexpected BLOCKS"):
        protocol.decode_header(
            protocol.encode_header(FrameKind.BLOCKS, 1, 10, num_blocks=1), frozenset({FrameKind.HELLO})
        )


def test_header_of_an_oversized_hello() -> None:
    with pytest.raises(TransferError, match="at most 16384"):
        protocol.decode_header(protocol.encode_header(FrameKind.HELLO, 0, 16385), EVERY_KIND)


def test_blocks_head_round_trip() -> None:
    frame = protocol.encode_blocks_head(7, BlockRange(2, 5, 2), [1, 2**64 - 1], payload_bytes=100)
    header = protocol.decode_header(frame[: protocol.HEADER_BYTES], EVERY_KIND)
    rest = frame[protocol.HEADER_BYTES :]
    assert header[:3] == (len(rest) + 100, FrameKind.BLOCKS, 7)
    assert len(rest) == protocol.blocks_head_bytes(header.num_blocks)
    protocol.check_body(header, rest)
    blocks, sums = protocol.decode_blocks_head(rest, header)
    assert blocks == BlockRange(2, 5, 2)
    assert list(sums) == [1, 2**64 - 1]


@pytest.mark.parametrize(("count", "length"), [(0, 100), (2, 23), (1025, 1 << 20)])
def test_blocks_without_their_sums_are_refused(count: int, length: int) -> None:
    """What is not in the frame would be waited for behind its end."""
    header = protocol.encode_header(FrameKind.BLOCKS, 7, length, num_blocks=count)
    with pytest.raises(TransferError, match=f"of {count} blocks and {length} bytes"):
        protocol.decode_header(header, EVERY_KIND)


def test_small_frames_round_trip() -> None:
    ranges = [BlockRange(0, 1, 2), BlockRange(9, 8, 7)]
    assert protocol.decode_resend(split(protocol.encode_resend(1, ranges))[1]) == ranges
    done = Done(16, b"abcd", b"sixteen bytes...")
    assert protocol.decode_done(split(protocol.encode_done(1, done))[1], 1) == done
    assert protocol.decode_heartbeat(split(protocol.encode_heartbeat(99))[1]) == 99
    for encode, kind in (
        (protocol.encode_cancel, FrameKind.CANCEL),
        (protocol.encode_release, FrameKind.RELEASE),
        (protocol.encode_start, FrameKind.START),
    ):
        header, body = split(encode(3))
        assert (header[:3], body) == ((0, kind, 3), b"")


def test_long_reasons_are_cut() -> None:
    _, body = split(protocol.encode_text(FrameKind.FAILED, 1, "ä" * 2000))
    assert len(body) <= protocol.MAX_TEXT_BYTES
    assert protocol.decode_text(body).startswith("ää")


FRAMES = [
    protocol.encode_hello(IDENTITY),
    protocol.encode_text(FrameKind.FAILED, 9, "no"),
    protocol.encode_blocks_head(7, BlockRange(2, 5, 2), [1, 2], 0),
    protocol.encode_done(7, Done(16, b"abcd", b"sixteen bytes...")),
    protocol.encode_resend(1, [BlockRange(0, 1, 2)]),
    protocol.encode_release(3),
    protocol.encode_heartbeat(99),
    protocol.encode_attach(5, 7),
    protocol.encode_start(5),
]


@pytest.mark.parametrize("frame", FRAMES, ids=[FrameKind(frame[4]).name for frame in FRAMES])
def test_every_flipped_bit_is_noticed(frame: bytes) -> None:
    split(frame)
    for bit in range(8 * len(frame)):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(IntegrityError):
            split(bytes(damaged))


def test_a_body_under_another_transfer_is_damaged() -> None:
    one, other = protocol.encode_attach(5, 7), protocol.encode_attach(6, 7)
    with pytest.raises(IntegrityError):
        protocol.check_body(split(other)[0]._replace(body_sum=split(one)[0].body_sum), split(one)[1])


def test_logits_that_are_not_those_that_were_summed() -> None:
    _, body = split(protocol.encode_done(7, Done(16, b"abcd")))
    with pytest.raises(IntegrityError, match="logits"):
        protocol.decode_done(body[:-1] + b"x", 7)
    with pytest.raises(IntegrityError, match="logits"):
        protocol.decode_done(body, 8)


def test_a_prompt_that_can_never_be_held_is_refused_by_its_header() -> None:
    limits = protocol.bound_bodies(1000)
    protocol.decode_header(protocol.encode_header(FrameKind.PREFILL, 1, 4 * 1000), EVERY_KIND, limits)
    with pytest.raises(TransferError, match="PREFILL frame of 10000 bytes"):
        protocol.decode_header(protocol.encode_header(FrameKind.PREFILL, 1, 10_000), EVERY_KIND, limits)
