"""Frames of the TCP transport: a pure codec between bytes and values.

A connection is opened by the decode worker. Both sides say HELLO first; then the decode worker sends PREFILL orders,
each under a random number (`transfer`) that it never uses again, and the prefill worker answers with BLOCKS, then DONE:

    decode ── HELLO, PREFILL, ATTACH, RESEND, RELEASE, CANCEL ──▶ prefill
    decode ◀─ HELLO or REFUSED, START, BLOCKS, DONE, FAILED, HEARTBEAT ── prefill

Whoever wants blocks that another worker has computed asks for them by name, on connections of its own:

    puller ── HELLO, FETCH, CANCEL ──▶ holder
    puller ◀─ HELLO or REFUSED, SLOTS, FETCHED or FAILED ── holder

Where both ends have Mooncake's engine, GRANT gives an order slots, and LANDED stands in the place of BLOCKS.

In groups the order goes from first rank to first rank. Every other pair of ranks that has something to move opens a
connection of its own, on which the decode rank says ATTACH under the order's number. A connection moves the slice of
each block that its two ranks have in common; layers are numbered as in the whole model.

Every frame is a 32-byte header and a body. All numbers are little-endian. The header has the length of the body, the
kind, the number of blocks, the transfer, a sum of the body and a sum of itself: where that one is wrong not even the
length can be believed, and the connection is of no more use. In BLOCKS the sum of the body covers what stands before
the payload, which has a sum per block there, so that single blocks can be asked for again. The header, HELLO and
REFUSED keep their form in all later versions: that is how two versions tell each other apart.

Every kind has a largest body: `decode_header` refuses what is larger. All functions raise `TransferError` on what they
cannot read, `IntegrityError` on what was damaged, and nothing else.
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from tandem_api.spans import read_context

from tandem_worker.engine.contract import RemotePrefill
from tandem_worker.engine.trace import Hop
from tandem_worker.transfer.checksums import Damage, sum_body, sum_header, sum_logits
from tandem_worker.transfer.contract import Identity, Offer
from tandem_worker.transfer.errors import IntegrityError, TransferError
from tandem_worker.transfer.layout import KVShard, RankAddress

MAGIC = "tandem-kv"
VERSION = 6

_FIELDS = struct.Struct("<IBxHQQ")  # length, kind, blocks in the frame, transfer, sum of the body
_SUM = struct.Struct("<Q")
_HEADER = struct.Struct("<IBxHQQQ")  # the same, and its sum
_PREFILL = struct.Struct("<IIIiIHHHH")
"""Tokens, cached tokens, generation, priority, tokens that a worker has of it, bytes of request id, of salt, of trace
context, of the name of that worker."""
_BLOCKS = struct.Struct("<HHI")  # layer, spare, first index
_RANGE = struct.Struct("<HHII")  # layer, spare, first index, count
_DONE = struct.Struct("<I16sQ")  # cached tokens, name of the prompt, sum of the logits
_ATTACH = struct.Struct("<I")  # blocks of the prompt that are wanted
_HEARTBEAT = struct.Struct("<Q")  # progress of the engine
_FETCH_HEAD_BYTES, SLOTS_HEAD_BYTES, _FETCHED_BYTES = 20, 4, 4
"""As `fetches` has them."""

HEADER_BYTES = _HEADER.size
_CHECKSUM_BYTES = 8
PROMPT_NAME_BYTES = 16
MAX_HELLO_BYTES = 16384
MAX_TEXT_BYTES = 1024
"""The longest reason, request id or cache salt."""
TRACE_BYTES = 55
"""Length of a `traceparent`."""
MAX_PAYLOAD_BYTES = 4 << 20
"""Payload of one BLOCKS frame; a single block may be larger (up to MAX_BLOCK_BYTES) and then travels alone."""
MAX_BLOCK_BYTES = 64 << 20
MAX_BLOCKS_PER_FRAME = 1024
MAX_RESENDS = 2
"""Times that an order's damaged blocks may be asked for."""
MAX_RESEND_RANGES = 4096
MAX_TOKENS = 10_485_760
BLOCK_NAME_BYTES = 16
MAX_NAMES = 1 << 16
"""Blocks that may be asked for at once."""
MAX_FETCH_SECONDS = 10.0
"""What is asked for by name is sent within this, or not at all."""
MAX_ENDPOINT_BYTES = 300
MAX_LOGITS_BYTES = 8 << 20


class FrameKind(IntEnum):
    HELLO = 1
    REFUSED = 2
    PREFILL = 3
    BLOCKS = 4
    DONE = 5
    FAILED = 6
    CANCEL = 7
    RESEND = 8
    RELEASE = 9
    HEARTBEAT = 10
    ATTACH = 11
    START = 12
    FETCH = 20
    SLOTS = 21
    FETCHED = 22
    GRANT = 30
    LANDED = 31


MAX_BODY: Mapping[FrameKind, int] = {
    FrameKind.HELLO: MAX_HELLO_BYTES,
    FrameKind.REFUSED: MAX_TEXT_BYTES,
    FrameKind.PREFILL: _PREFILL.size + 4 * MAX_TOKENS + 2 * MAX_TEXT_BYTES + TRACE_BYTES + MAX_ENDPOINT_BYTES,
    FrameKind.BLOCKS: _BLOCKS.size + _CHECKSUM_BYTES * MAX_BLOCKS_PER_FRAME + MAX_BLOCK_BYTES,
    FrameKind.DONE: _DONE.size + MAX_LOGITS_BYTES,
    FrameKind.FAILED: MAX_TEXT_BYTES,
    FrameKind.CANCEL: 0,
    FrameKind.RESEND: _RANGE.size * MAX_RESEND_RANGES,
    FrameKind.RELEASE: 0,
    FrameKind.HEARTBEAT: _HEARTBEAT.size,
    FrameKind.ATTACH: _ATTACH.size,
    FrameKind.START: 0,
    FrameKind.FETCH: _FETCH_HEAD_BYTES + BLOCK_NAME_BYTES * MAX_NAMES,
    FrameKind.SLOTS: SLOTS_HEAD_BYTES + MAX_BLOCK_BYTES,
    FrameKind.FETCHED: _FETCHED_BYTES,
    FrameKind.GRANT: 1 << 12,  # those of `mooncake.frames`
    FrameKind.LANDED: 64 << 10,
}


class Header(NamedTuple):
    length: int
    kind: FrameKind
    transfer: int
    body_sum: int
    num_blocks: int
    """In BLOCKS and SLOTS; else 0."""


@dataclass(frozen=True, slots=True)
class BlockRange:
    """`count` consecutive blocks of the prompt in one layer, beginning with prompt block `first`."""

    layer: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Done:
    num_cached_tokens: int
    logits: bytes
    prompt_name: bytes = bytes(PROMPT_NAME_BYTES)
    """`prefix_cache.name_prompt` of what was computed; zeros where a rank does not know."""


def bound_bodies(max_prompt_tokens: int) -> Mapping[FrameKind, int]:
    """`MAX_BODY` at a worker that can hold no longer prompt."""
    texts = 2 * MAX_TEXT_BYTES + TRACE_BYTES + MAX_ENDPOINT_BYTES
    prefill = _PREFILL.size + 4 * min(max_prompt_tokens, MAX_TOKENS) + texts
    return {**MAX_BODY, FrameKind.PREFILL: prefill}


def encode_header(kind: FrameKind, transfer: int, length: int, body: bytes = b"", num_blocks: int = 0) -> bytes:
    """`length` counts a payload behind `body` too."""
    fields = _FIELDS.pack(length, kind, num_blocks, transfer, sum_body(body, transfer))
    return fields + _SUM.pack(sum_header(fields))


def decode_header(
    data: bytes | bytearray | memoryview, allowed: frozenset[FrameKind], max_body: Mapping[FrameKind, int] = MAX_BODY
) -> Header:
    """`allowed` are the kinds that make sense now: before HELLO only HELLO, and never the peer's own."""
    length, number, num_blocks, transfer, body_sum, header_sum = _HEADER.unpack_from(data)
    if sum_header(data[: _FIELDS.size]) != header_sum:
        raise IntegrityError("the header of a frame is damaged", Damage.HEADER)
    try:
        kind = FrameKind(number)
    except ValueError:
        raise TransferError(f"the peer sent a frame of unknown kind {number}") from None
    if kind not in allowed:
        raise TransferError(f"the peer sent an unexpected {kind.name} frame")
    if length > max_body[kind]:
        raise TransferError(f"the peer sent a {kind.name} frame of {length} bytes; at most {max_body[kind]} are taken")
    if kind is FrameKind.BLOCKS:
        _check_blocks(num_blocks, length)
    elif kind is FrameKind.SLOTS and (not 0 < num_blocks <= MAX_BLOCKS_PER_FRAME or length < SLOTS_HEAD_BYTES):
        raise TransferError(f"the peer sent a SLOTS frame of {num_blocks} blocks and {length} bytes")
    return Header(length, kind, transfer, body_sum, num_blocks)


def _check_blocks(num_blocks: int, length: int) -> None:
    if not 0 < num_blocks <= MAX_BLOCKS_PER_FRAME or blocks_head_bytes(num_blocks) > length:
        most = f"1 to {MAX_BLOCKS_PER_FRAME} blocks with their sums are taken"
        raise TransferError(f"the peer sent a BLOCKS frame of {num_blocks} blocks and {length} bytes; {most}")


def check_body(header: Header, body: bytes | bytearray | memoryview) -> None:
    """`body` is all of it, or what stands before the payload. Raises IntegrityError."""
    if sum_body(body, header.transfer) != header.body_sum:
        raise IntegrityError(f"the body of a {header.kind.name} frame is damaged", Damage.BODY)


def encode_frame(kind: FrameKind, transfer: int, body: bytes = b"") -> bytes:
    """A whole frame."""
    return encode_header(kind, transfer, len(body), body) + body


def encode_hello(identity: Identity) -> bytes:
    """Raises TransferError when it is longer than peers accept."""
    body = json.dumps(
        {
            "magic": MAGIC,
            "version": VERSION,
            "worker": identity.worker,
            "revision": identity.revision,
            "modelDigest": identity.model_digest,
            "layout": identity.layout,
            "shard": None if identity.shard is None else encode_shard(identity.shard),
            "ranks": encode_ranks(identity.ranks),
            "offers": [[offer.transport, offer.protocol, offer.obstacle] for offer in identity.offers],
            "instance": identity.instance,
            "unsettled": identity.unsettled,
        }
    ).encode()
    if len(body) > MAX_HELLO_BYTES:
        raise TransferError(f"our hello takes {len(body)} bytes, more than the {MAX_HELLO_BYTES} that peers accept")
    return encode_frame(FrameKind.HELLO, 0, body)


def decode_hello(body: bytes) -> Identity:
    """Raises TransferError for another version, and for what is no HELLO."""
    try:
        fields = json.loads(body)
        magic, version = fields["magic"], fields["version"]
        if magic == MAGIC and version != VERSION:
            raise TransferError(f"the peer speaks version {version!r} of the KV transport, we speak {VERSION}")
        identity = Identity(
            worker=str(fields["worker"]),
            revision=str(fields["revision"]),
            model_digest=str(fields["modelDigest"]),
            layout=str(fields["layout"]),
            shard=None if fields["shard"] is None else decode_shard(fields["shard"]),
            ranks=decode_ranks(fields["ranks"]),
            offers=tuple(Offer(*map(str, offer)) for offer in fields["offers"]),
            instance=str(fields["instance"]),
            unsettled=tuple(map(str, fields["unsettled"])),
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise TransferError("the peer's hello is not one of Tandem's KV transport") from error
    if magic != MAGIC:
        raise TransferError("the peer's hello is not one of Tandem's KV transport")
    return identity


def encode_shard(shard: KVShard) -> list[int]:
    """As HELLO has it: first layer, number of layers, tensor-parallel rank, their number."""
    return [shard.first_layer, shard.num_layers, shard.tp_rank, shard.tp_size]


def decode_shard(numbers: Sequence[int]) -> KVShard:
    """Raises ValueError, TypeError."""
    first, count, tp_rank, tp_size = (int(number) for number in numbers)
    if not (0 <= first <= 0xFFFF and 0 < count <= 0xFFFF and 0 <= tp_rank < tp_size):
        raise ValueError(f"{numbers} is not a shard")
    return KVShard(first_layer=first, num_layers=count, tp_rank=tp_rank, tp_size=tp_size)


def encode_ranks(ranks: Sequence[RankAddress]) -> list[list[Any]]:
    """As HELLO has them: the endpoint of each rank, followed by its shard."""
    return [[rank.endpoint, *encode_shard(rank.shard)] for rank in ranks]


def decode_ranks(entries: Sequence[Sequence[Any]]) -> tuple[RankAddress, ...]:
    """Raises ValueError, TypeError."""
    return tuple(RankAddress(endpoint=str(where), shard=decode_shard(shard)) for where, *shard in entries)


def encode_text(kind: FrameKind, transfer: int, text: str) -> bytes:
    """REFUSED or FAILED with its reason, cut to what peers accept."""
    return encode_frame(kind, transfer, text.encode()[:MAX_TEXT_BYTES])


def decode_text(body: bytes) -> str:
    """The reason in a REFUSED or FAILED frame; bytes that are no UTF-8 are replaced."""
    return body.decode(errors="replace")


def _little_endian(values: array[int]) -> array[int]:
    if sys.byteorder == "big":
        values.byteswap()
    return values


def encode_prefill(transfer: int, order: RemotePrefill) -> bytes:
    """Raises TransferError when a field is longer than the frame has room for."""
    request_id, salt = order.request_id.encode(), order.cache_salt.encode()
    source = order.kv_source.encode()
    if len(request_id) > MAX_TEXT_BYTES or len(salt) > MAX_TEXT_BYTES or len(order.token_ids) > MAX_TOKENS:
        raise TransferError("the request id, the cache salt or the prompt is too long for the KV transport")
    if len(source) > MAX_ENDPOINT_BYTES:
        raise TransferError("the name of the worker that has a part of the prompt is too long for the KV transport")
    trace = b"" if order.hop is None else order.hop.context.header.encode()
    fixed = _PREFILL.pack(
        len(order.token_ids), order.num_cached_tokens, order.generation, int(order.priority),
        min(order.kv_source_tokens, len(order.token_ids)), len(request_id), len(salt), len(trace), len(source),
    )  # fmt: skip
    tokens = _little_endian(array("I", order.token_ids)).tobytes()
    return encode_frame(FrameKind.PREFILL, transfer, fixed + tokens + request_id + salt + trace + source)


def decode_prefill(body: bytes) -> RemotePrefill:
    """The order as the prefill engine takes it: without blocks and endpoints."""
    try:
        num_tokens, cached, generation, priority, held, *sizes = _PREFILL.unpack_from(body)
        id_bytes, salt_bytes, trace_bytes, source_bytes = sizes
        offset = _PREFILL.size + 4 * num_tokens
        if len(body) != offset + sum(sizes):
            raise TransferError("the peer sent a PREFILL frame whose length contradicts its contents")
        tokens = array("I")
        tokens.frombytes(body[_PREFILL.size : offset])
        request_id = body[offset : offset + id_bytes].decode()
        salt = body[offset + id_bytes : offset + id_bytes + salt_bytes].decode()
        offset += id_bytes + salt_bytes
        context = read_context(body[offset : offset + trace_bytes]) if trace_bytes else None
        source = body[offset + trace_bytes :].decode()
    except (struct.error, UnicodeDecodeError) as error:
        raise TransferError("the peer sent a PREFILL frame that cannot be read") from error
    if num_tokens == 0 or cached >= num_tokens:
        raise TransferError("the peer ordered a prefill of no tokens")
    if trace_bytes and context is None:
        raise TransferError("the peer sent a trace context that is none")
    if id_bytes > MAX_TEXT_BYTES or salt_bytes > MAX_TEXT_BYTES or source_bytes > MAX_ENDPOINT_BYTES:
        raise TransferError(f"the peer sent a text of more than {MAX_TEXT_BYTES} bytes")
    return RemotePrefill(
        request_id=request_id,
        generation=generation,
        token_ids=tuple(_little_endian(tokens)),
        num_cached_tokens=cached,
        block_ids=(),
        endpoints=(),
        kv_source=source,
        kv_source_tokens=held,
        cache_salt=salt,
        priority=priority,
        hop=None if context is None else Hop(context),
    )


def encode_blocks_head(transfer: int, blocks: BlockRange, checksums: Sequence[int], payload_bytes: int) -> bytes:
    """Everything of a BLOCKS frame but the payload."""
    sums = _little_endian(array("Q", checksums)).tobytes()
    head = _BLOCKS.pack(blocks.layer, 0, blocks.first) + sums
    return encode_header(FrameKind.BLOCKS, transfer, len(head) + payload_bytes, head, blocks.count) + head


def decode_blocks_head(data: bytes | bytearray, header: Header) -> tuple[BlockRange, array[int]]:
    """What stands before the payload, `blocks_head_bytes` long, and was checked: which blocks, and their sums."""
    layer, _, first = _BLOCKS.unpack_from(data)
    sums = array("Q")
    sums.frombytes(memoryview(data)[_BLOCKS.size :])
    return BlockRange(layer, first, header.num_blocks), _little_endian(sums)


def blocks_head_bytes(num_blocks: int) -> int:
    """Bytes between header and payload of a BLOCKS frame with so many blocks."""
    return _BLOCKS.size + _CHECKSUM_BYTES * num_blocks


def encode_done(transfer: int, done: Done) -> bytes:
    """DONE: the prompt is computed. Carries its logits and their checksum."""
    fixed = _DONE.pack(done.num_cached_tokens, done.prompt_name, sum_logits(done.logits, transfer))
    return encode_frame(FrameKind.DONE, transfer, fixed + done.logits)


def decode_done(body: bytes, transfer: int) -> Done:
    """Raises TransferError for a frame that is cut off, IntegrityError for damaged logits."""
    if len(body) < _DONE.size:
        raise TransferError("the peer sent a DONE frame that cannot be read")
    cached, prompt_name, logits_sum = _DONE.unpack_from(body)
    logits = body[_DONE.size :]
    if sum_logits(logits, transfer) != logits_sum:
        raise IntegrityError("the logits are damaged", Damage.LOGITS)
    return Done(cached, logits, prompt_name)


def encode_start(transfer: int) -> bytes:
    """The prompt is being computed: from now on the order progresses, or there is something wrong."""
    return encode_frame(FrameKind.START, transfer)


def encode_resend(transfer: int, ranges: Sequence[BlockRange]) -> bytes:
    """Ask for these blocks again; beyond MAX_RESEND_RANGES the rest is not asked for."""
    body = b"".join(_RANGE.pack(r.layer, 0, r.first, r.count) for r in ranges[:MAX_RESEND_RANGES])
    return encode_frame(FrameKind.RESEND, transfer, body)


def decode_resend(body: bytes) -> list[BlockRange]:
    """Raises TransferError."""
    if not body or len(body) % _RANGE.size:
        raise TransferError("the peer sent a RESEND frame that cannot be read")
    return [BlockRange(layer, first, count) for layer, _, first, count in _RANGE.iter_unpack(body)]


def encode_cancel(transfer: int) -> bytes:
    """CANCEL: the decode worker does not want this transfer any more."""
    return encode_frame(FrameKind.CANCEL, transfer)


def encode_release(transfer: int) -> bytes:
    """RELEASE: everything has arrived; the prefill worker may use the blocks again."""
    return encode_frame(FrameKind.RELEASE, transfer)


def encode_attach(transfer: int, num_blocks: int) -> bytes:
    """Join the order that was or will be given under the same number to the first rank of the prefill group."""
    return encode_frame(FrameKind.ATTACH, transfer, _ATTACH.pack(num_blocks))


def decode_attach(body: bytes) -> int:
    """How many blocks of the prompt the order is about: all behind those that the decode worker has."""
    if len(body) != _ATTACH.size:
        raise TransferError("the peer sent an ATTACH frame that cannot be read")
    num_blocks = _ATTACH.unpack(body)[0]
    if num_blocks == 0:
        raise TransferError("the peer attached to an order for no blocks")
    return num_blocks


def encode_heartbeat(progress: int) -> bytes:
    """HEARTBEAT with the number of steps that this worker's engine has made."""
    return encode_frame(FrameKind.HEARTBEAT, 0, _HEARTBEAT.pack(progress))


def decode_heartbeat(body: bytes) -> int:
    """Steps that the peer's engine has made. Raises TransferError."""
    if len(body) != _HEARTBEAT.size:
        raise TransferError("the peer sent a HEARTBEAT frame that cannot be read")
    return _HEARTBEAT.unpack(body)[0]
