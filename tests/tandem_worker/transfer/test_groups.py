"""Workers of several ranks: every decode rank gets its slices from the prefill ranks that hold them, or none does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tandem_worker.transfer.decode import link as link_module

from tests.tandem_worker.transfer.group_rig import Groups, running
from tests.tandem_worker.transfer.shards import build_layout, spread

LAYERS, HEADS = 4, 4
BuildGroups = Callable[..., Groups]


@pytest.fixture
def build(kit: SimpleNamespace) -> Iterator[BuildGroups]:
    with ExitStack() as stack:

        def make(
            source: dict[str, int], target: dict[str, int], *, heads: int | None = HEADS, **options: Any
        ) -> Groups:
            layout = build_layout(LAYERS, heads)
            engine, decode = kit.ScriptedPrefill(auto=False), kit.NotingDecode()
            # Here ranks are held back or lost, never slow: how long they may be silent is no part of it. With the
            # quick 0.3 s a busy machine gives an order up while a rank that was held back comes again.
            patient = replace(kit.QUICK, connect=5.0, handshake=5.0, frame=10.0, silence=30.0, stall=30.0, queue=30.0)
            shards = spread(LAYERS, **source), spread(LAYERS, **target)
            groups = Groups(layout, *shards, engine, decode, patient, **options)
            return stack.enter_context(running(groups))

        yield make


@pytest.mark.parametrize("heads", [HEADS, None], ids=["heads", "latents"])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param({}, {"tp": 2}, id="TP1-TP2"),
        pytest.param({"tp": 2}, {}, id="TP2-TP1"),
        pytest.param({"tp": 2}, {"tp": 4}, id="TP2-TP4"),
        pytest.param({"tp": 2}, {"tp": 2}, id="TP2-TP2"),
        pytest.param({"pp": 2}, {}, id="PP2-PP1"),
        pytest.param({}, {"pp": 2}, id="PP1-PP2"),
        pytest.param({"tp": 2}, {"pp": 2}, id="TP2xPP1-TP1xPP2"),
        pytest.param({"tp": 2, "pp": 2}, {"tp": 8}, id="TP2xPP2-TP8-copied-heads"),
    ],
)
def test_every_rank_gets_its_share(
    build: BuildGroups, kit: SimpleNamespace, source: dict[str, int], target: dict[str, int], heads: int | None
) -> None:
    groups = build(source, target, heads=heads)
    for generation, (tokens, cached) in enumerate([(30, 0), (32, 8)]):
        for cache in groups.target_caches:
            for layer in cache.layers:
                layer.zero_()
        groups.engine.orders.clear()
        groups.client.start(groups.order(tokens=tokens, cached=cached, generation=generation))
        name = groups.run_prefill()
        kit.eventually(lambda count=generation + 1: len(groups.decode.done) == count)
        assert groups.decode.done[-1].logits == groups.engine.logits
        assert groups.arrived(cached // 4, -(-tokens // 4))
        kit.eventually(lambda name=name: name in groups.engine.released)
    assert groups.decode.failed == []
    groups.prefill_posts.settle()
    kit.eventually(lambda: not any(server._outbox._shelves for server in groups.servers))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param({"tp": 2}, {"tp": 4}, id="TP2-TP4"),
        pytest.param({"tp": 2}, {"pp": 2}, id="TP2xPP1-TP1xPP2"),
    ],
)
def test_every_rank_gets_its_share_through_mooncake(
    build: BuildGroups, kit: SimpleNamespace, source: dict[str, int], target: dict[str, int]
) -> None:
    groups = build(source, target, transport="Mooncake")
    groups.client.start(groups.order(tokens=32, cached=8))
    name = groups.run_prefill()
    kit.eventually(lambda: bool(groups.decode.done))
    assert groups.arrived(2, 8)
    kit.eventually(lambda: name in groups.engine.released)
    for end in (groups.client, *groups.receivers):
        assert list(end.stats().transports) == ["Mooncake"]


def test_only_the_slices_that_are_needed_travel(build: BuildGroups, kit: SimpleNamespace) -> None:
    groups = build({}, {"tp": 2})
    groups.client.start(groups.order(tokens=32))
    groups.run_prefill()
    kit.eventually(lambda: bool(groups.decode.done))
    whole = 8 * sum(groups.layout.block_bytes)
    assert groups.client.stats().bytes_received == groups.receivers[0].stats().bytes_received == whole // 2
    kit.eventually(lambda: groups.servers[0].stats().bytes_sent == whole)


def test_a_rank_connects_to_those_alone_that_have_something_for_it(build: BuildGroups, kit: SimpleNamespace) -> None:
    groups = build({"tp": 4}, {"tp": 2})
    groups.client.start(groups.order())
    groups.run_prefill()
    kit.eventually(lambda: bool(groups.decode.done))
    assert [groups.client.stats().connections, groups.receivers[0].stats().connections] == [2, 2]
    assert [server.stats().connections for server in groups.servers] == [1, 1, 1, 1]


def test_blocks_are_kept_until_the_last_rank_has_everything(build: BuildGroups, kit: SimpleNamespace) -> None:
    groups = build({"tp": 2}, {"tp": 2})
    groups.decode_posts.hold.clear()  # the second decode rank is inside a long step and does not attach yet
    groups.client.start(groups.order())
    name = groups.run_prefill()
    kit.eventually(lambda: groups.client.stats().bytes_received == 8 * sum(groups.layout.block_bytes) // 2)
    assert groups.engine.released == []
    assert groups.decode.done == []
    groups.decode_posts.hold.set()
    kit.eventually(lambda: bool(groups.decode.done))
    assert groups.arrived(0, 8)
    kit.eventually(lambda: groups.engine.released == [name])


def test_ranks_may_attach_before_and_after_the_blocks_are_ready(build: BuildGroups, kit: SimpleNamespace) -> None:
    groups = build({"tp": 2}, {})
    groups.prefill_posts.hold.clear()  # the second prefill rank hears of nothing yet
    groups.client.start(groups.order())
    groups.run_prefill()
    kit.eventually(lambda: groups.servers[1].stats().connections == 1)
    assert groups.decode.done == []
    groups.prefill_posts.hold.set()
    kit.eventually(lambda: bool(groups.decode.done))
    assert groups.arrived(0, 8)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_prefill_rank_that_dies_fails_the_order_for_all(build: BuildGroups, kit: SimpleNamespace, rank: int) -> None:
    groups = build({"tp": 2}, {"tp": 2, "pp": 2})
    groups.client.start(groups.order())
    name = groups.engine.next_order()
    for layer in range(LAYERS):  # half of the prompt: who has everything needs the rank no more
        groups.engine.orders[name][1].blocks_ready(name, layer, 0, [15 - index for index in range(4)])
    kit.eventually(lambda: all(cache.layers[0].any() for cache in groups.target_caches))
    groups.servers[rank].close()
    kit.eventually(lambda: bool(groups.decode.failed))
    assert groups.decode.failed[0][:2] == ("a", 1)
    assert len(groups.decode.failed) == 1
    groups.decode_posts.settle()
    kit.eventually(lambda: len(groups.engine.released) == 1)
    kit.eventually(lambda: not any(receiver._intakes for receiver in groups.receivers))
    assert groups.decode.done == []


def test_a_rank_that_cannot_be_reached_fails_the_order_and_the_next_worker_is_tried(
    build: BuildGroups, kit: SimpleNamespace
) -> None:
    broken, good = build({"tp": 2}, {"tp": 2}), build({"pp": 2}, {})
    broken.servers[1].close()
    broken.client.start(broken.order(broken.endpoint, good.endpoint))
    good.run_prefill()
    kit.eventually(lambda: bool(broken.decode.done))
    assert broken.arrived(0, 8)
    kit.eventually(lambda: len(broken.engine.released) == 1)
    assert broken.decode.failed == []


@pytest.mark.parametrize("times", [1, 9])
def test_a_damaged_slice_is_asked_for_again_and_given_up_in_the_end(
    build: BuildGroups, kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Of two ranks' slices one arrives damaged."""
    groups = build({"tp": 2}, {})
    victim = f"127.0.0.1:{groups.ports[1]}"
    damaged: list[int] = []
    honest = link_module.sum_blocks

    def check(blocks: Any, *where: int) -> list[int]:
        if threading.current_thread().name == f"kv-link-{victim}" and len(damaged) < times:
            damaged.append(1)
            blocks[0][0][:4] = b"\xff\xff\xff\xff"
        return honest(blocks, *where)

    monkeypatch.setattr(link_module, "sum_blocks", check)
    groups.client.start(groups.order(tokens=4))
    groups.run_prefill()
    if times == 1:
        kit.eventually(lambda: bool(groups.decode.done))
        assert groups.arrived(0, 1)
        assert groups.client.stats().resends == 1
    else:
        kit.eventually(lambda: bool(groups.decode.failed))
        assert "damaged 3 times" in groups.decode.failed[0][2]
        assert groups.decode.done == []
    kit.eventually(lambda: len(groups.engine.released) == 1)


@pytest.mark.parametrize("moment", ["before", "between"])
def test_nothing_lands_on_any_rank_after_cancel(build: BuildGroups, kit: SimpleNamespace, moment: str) -> None:
    groups = build({"tp": 2}, {"pp": 2})
    groups.client.start(groups.order())
    name = groups.engine.next_order()
    if moment == "between":
        groups.engine.run(name, range(2), finish=False)
        kit.eventually(lambda: bool(groups.target_caches[0].layers[0].any()))
    groups.client.cancel("a", 1)
    groups.decode_posts.settle()  # from here on the blocks may be used for something else, on every rank
    before = groups.snapshot()
    kit.eventually(lambda: groups.engine.released == [name])
    groups.engine.run(name, range(LAYERS))
    groups.prefill_posts.settle()
    groups.engine.orders.clear()
    groups.client.start(groups.order(generation=2, tokens=4))  # a round trip behind whatever is on its way
    groups.engine.next_order()
    assert all(torch.equal(a, b) for a, b in zip(before, groups.snapshot(), strict=True))
    assert groups.decode.done == groups.decode.failed == []


def test_blocks_given_back_by_the_prefill_worker_are_not_read_any_more(
    build: BuildGroups, kit: SimpleNamespace
) -> None:
    """The first ranks lose each other: the second prefill rank must not send what its blocks hold afterwards."""
    groups = build({"tp": 2}, {"tp": 2})
    groups.prefill_posts.hold.clear()
    groups.client.start(groups.order())
    groups.run_prefill()
    kit.eventually(lambda: bool(groups.target_caches[0].layers[LAYERS - 1].any()))
    groups.servers[0].close()
    kit.eventually(lambda: bool(groups.decode.failed))
    groups.decode_posts.settle()
    groups.prefill_posts.hold.set()
    groups.prefill_posts.settle()
    assert not any(layer.any() for layer in groups.target_caches[1].layers)
    kit.eventually(lambda: not groups.servers[1]._outbox._shelves)


def test_an_order_at_a_following_rank_is_refused(build: BuildGroups, kit: SimpleNamespace) -> None:
    groups = build({"tp": 2}, {})
    groups.client.start(groups.order(f"127.0.0.1:{groups.ports[1]}"))
    kit.eventually(lambda: bool(groups.decode.failed))
    assert "the first rank of its group" in groups.decode.failed[0][2]


def test_ranks_that_do_not_make_a_model_are_refused(build: BuildGroups, kit: SimpleNamespace) -> None:
    groups, other = build({"tp": 2}, {}), build({}, {}, heads=2)
    groups.client.start(groups.order(other.endpoint))
    kit.eventually(lambda: bool(groups.decode.failed))
    assert "KV layout differs" in groups.decode.failed[0][2]
