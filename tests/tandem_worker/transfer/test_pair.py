"""Both ends on loopback: what is ordered arrives, what is cancelled does not, nothing stays allocated."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from tandem_worker.transfer.channel import Waker
from tandem_worker.transfer.prefill import reports

pytestmark = pytest.mark.parametrize("transport", ["TCP", "Mooncake"])


@pytest.mark.parametrize(("tokens", "cached"), [(1, 0), (4, 0), (30, 0), (30, 8), (32, 28)])
def test_ordered_blocks_arrive(pair: Any, kit: SimpleNamespace, tokens: int, cached: int) -> None:
    pair.client.start(pair.order(pair.serve(), tokens=tokens, cached=cached))
    kit.eventually(lambda: bool(pair.decode.done))
    result = pair.decode.done[0]
    assert (result.request_id, result.generation, result.worker) == ("a", 1, "prefill-0")
    assert result.logits == pair.prefill.logits
    assert result.num_cached_tokens == cached
    assert pair.arrived(cached // 4, -(-tokens // 4))
    kit.eventually(lambda: len(pair.prefill.released) == 1)


def test_the_order_reaches_the_prefill_engine(pair: Any, kit: SimpleNamespace) -> None:
    pair.client.start(pair.order(pair.serve(), tokens=30, cached=8))
    kit.eventually(lambda: bool(pair.decode.done))
    (order, _), *_ = pair.prefill.orders.values()
    assert order.token_ids == tuple(range(30))
    assert (order.num_cached_tokens, order.cache_salt, order.priority) == (8, "salt", -2)
    assert (order.block_ids, order.endpoints) == ((), ())


def test_layers_are_sent_before_the_prompt_is_done(held_pair: Any, kit: SimpleNamespace) -> None:
    held_pair.client.start(held_pair.order(held_pair.serve()))
    name = held_pair.prefill.next_order()
    held_pair.prefill.run(name, range(1), finish=False)
    kit.eventually(lambda: bool(held_pair.target.layers[0][8].any()))
    assert not held_pair.target.layers[1].any()
    held_pair.prefill.run(name, range(1, 3))
    kit.eventually(lambda: bool(held_pair.decode.done))
    assert held_pair.arrived(0, 8)


@pytest.mark.parametrize(("seconds", "most", "wakes"), [(1e9, 1 << 30, 1), (1e9, 1, 3), (0.0, 1 << 30, 3)])
def test_layers_that_are_done_quickly_are_sent_together(
    held_pair: Any, kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, seconds: float, most: int, wakes: int
) -> None:
    monkeypatch.setattr(reports, "_GATHERED_SECONDS", seconds)
    monkeypatch.setattr(reports, "_GATHERED_BYTES", most)
    held_pair.client.start(held_pair.order(held_pair.serve()))
    name, wake, woken = held_pair.prefill.next_order(), Waker.wake, list[int]()

    def count(waker: Waker) -> None:
        woken.append(threading.get_ident())
        wake(waker)

    monkeypatch.setattr(Waker, "wake", count)
    held_pair.prefill.run(name, finish=False)
    assert woken.count(threading.get_ident()) == wakes
    kit.eventually(lambda: all(layer[8].any() for layer in held_pair.target.layers))
    held_pair.prefill.run(name, range(0))
    kit.eventually(lambda: bool(held_pair.decode.done))
    assert held_pair.arrived(0, 8)


def test_many_orders_share_one_connection(kit: SimpleNamespace, transport: str) -> None:
    pair = kit.Pair(transport=transport)
    try:
        endpoint = pair.serve()
        for number in range(40):
            pair.client.start(pair.order(endpoint, tokens=60, name=f"r{number}"))
        kit.eventually(lambda: len(pair.decode.done) == 40)
        assert pair.client.stats().connections == 1
        assert pair.client.stats().bytes_received == 40 * 15 * 3 * 2 * 2 * 4 * 8 * 4
        kit.eventually(lambda: pair.server.stats().bytes_sent == pair.client.stats().bytes_received)
        kit.eventually(lambda: len(pair.prefill.released) == 40)
        assert pair.client.stats().bytes_per_second is not None
    finally:
        pair.close()


def test_one_request_id_may_come_again(pair: Any, kit: SimpleNamespace) -> None:
    endpoint = pair.serve()
    pair.client.start(pair.order(endpoint, generation=1))
    pair.client.start(pair.order(endpoint, generation=2))
    kit.eventually(lambda: len(pair.decode.done) == 2)
    assert len(pair.prefill.orders) == 2


def test_cancel_releases_the_blocks_at_the_prefill_worker(held_pair: Any, kit: SimpleNamespace) -> None:
    held_pair.client.start(held_pair.order(held_pair.serve()))
    name = held_pair.prefill.next_order()
    held_pair.client.cancel("a", 1)
    kit.eventually(lambda: held_pair.prefill.released == [name])
    held_pair.prefill.run(name)
    held_pair.client.start(held_pair.order(held_pair.serve(), name="b", tokens=4))
    kit.eventually(lambda: len(held_pair.prefill.orders) == 2)
    assert held_pair.untouched
    assert held_pair.decode.done == []
    assert held_pair.decode.failed == []


def test_cancel_of_another_generation_changes_nothing(held_pair: Any, kit: SimpleNamespace) -> None:
    held_pair.client.start(held_pair.order(held_pair.serve(), generation=2))
    name = held_pair.prefill.next_order()
    held_pair.client.cancel("a", 1)
    held_pair.client.cancel("unknown", 1)
    held_pair.prefill.run(name)
    kit.eventually(lambda: bool(held_pair.decode.done))


def test_cancel_before_the_connection_stands(pair: Any, kit: SimpleNamespace) -> None:
    endpoint = pair.serve()
    pair.client.start(pair.order(endpoint))
    pair.client.cancel("a", 1)
    pair.client.start(pair.order(endpoint, name="b", tokens=4))
    kit.eventually(lambda: [r.request_id for r in pair.decode.done] == ["b"])


@pytest.mark.parametrize("field", ["revision", "model_digest", "layout"])
def test_different_workers_do_not_exchange_blocks(pair: Any, kit: SimpleNamespace, field: str) -> None:
    pair.client.start(pair.order(pair.serve(**{field: "other"})))
    kit.eventually(lambda: bool(pair.decode.failed))
    assert "refused" in pair.decode.failed[0][2]
    assert "'other'" in pair.decode.failed[0][2]
    assert pair.untouched
    assert pair.prefill.orders == {}


def test_the_next_endpoint_is_tried(pair: Any, kit: SimpleNamespace) -> None:
    pair.client.start(pair.order("127.0.0.1:1", "not an endpoint", pair.serve()))
    kit.eventually(lambda: bool(pair.decode.done))
    assert pair.arrived(0, 8)
    assert pair.decode.failed == []


def test_failure_when_no_endpoint_answers(pair: Any, kit: SimpleNamespace) -> None:
    pair.client.start(pair.order("127.0.0.1:1"))
    kit.eventually(lambda: bool(pair.decode.failed))
    assert pair.decode.failed[0][:2] == ("a", 1)
    assert "cannot connect" in pair.decode.failed[0][2]
    pair.client.start(pair.order(name="b"))
    assert pair.decode.failed[1] == ("b", 1, "no prefill worker was named")
    assert pair.client.stats().failures == 2


def test_draining_worker_refuses_and_finishes_what_it_has(held_pair: Any, kit: SimpleNamespace) -> None:
    endpoint = held_pair.serve()
    held_pair.client.start(held_pair.order(endpoint))
    name = held_pair.prefill.next_order()
    held_pair.server.drain()
    held_pair.client.start(held_pair.order(endpoint, name="b"))
    kit.eventually(lambda: bool(held_pair.decode.failed))
    assert held_pair.decode.failed[0][0] == "b"
    assert "draining" in held_pair.decode.failed[0][2]
    held_pair.prefill.run(name)
    kit.eventually(lambda: [r.request_id for r in held_pair.decode.done] == ["a"])


def test_engine_that_refuses_the_order(pair: Any, kit: SimpleNamespace) -> None:
    pair.prefill.stop_admitting()
    pair.client.start(pair.order(pair.serve()))
    kit.eventually(lambda: bool(pair.decode.failed))
    assert "draining" in pair.decode.failed[0][2]


def test_engine_that_fails_the_prompt(held_pair: Any, kit: SimpleNamespace) -> None:
    held_pair.client.start(held_pair.order(held_pair.serve()))
    name = held_pair.prefill.next_order()
    held_pair.prefill.run(name, range(1), finish=False)
    held_pair.prefill.orders[name][1].prefill_failed(name, "no block is free")
    kit.eventually(lambda: bool(held_pair.decode.failed))
    assert "no block is free" in held_pair.decode.failed[0][2]


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("hasty", [{"stall": 2.0, "handshake": 15.0, "silence": 15.0, "queue": 60.0}], indirect=True)
def test_a_queued_order_waits_while_the_peers_engine_moves_on(held_pair: Any, kit: SimpleNamespace) -> None:
    held_pair.client.start(held_pair.order(held_pair.serve()))
    name = held_pair.prefill.next_order()
    over = time.monotonic() + 1.5 * held_pair.timeouts.stall
    while time.monotonic() < over:
        held_pair.prefill.steps += 1
        time.sleep(0.06)
    assert held_pair.decode.failed == []
    held_pair.prefill.run(name)
    kit.eventually(lambda: bool(held_pair.decode.done))


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("hasty", [{"handshake": 15.0, "silence": 15.0}], indirect=True)
def test_a_stalled_engine_is_given_up(held_pair: Any, kit: SimpleNamespace) -> None:
    held_pair.client.start(held_pair.order(held_pair.serve()))
    name = held_pair.prefill.next_order()
    kit.eventually(lambda: bool(held_pair.decode.failed))
    assert "no progress" in held_pair.decode.failed[0][2]
    kit.eventually(lambda: held_pair.prefill.released == [name])


def test_a_lost_decode_worker_frees_its_blocks(held_pair: Any, kit: SimpleNamespace) -> None:
    held_pair.client.start(held_pair.order(held_pair.serve()))
    name = held_pair.prefill.next_order()
    held_pair.prefill.run(name, range(2), finish=False)
    held_pair.client.close()
    kit.eventually(lambda: held_pair.prefill.released == [name])
    kit.eventually(lambda: held_pair.server.stats().connections == 0)
    assert held_pair.decode.failed[0][0] == "a"


def test_closing_the_prefill_worker_fails_its_orders(held_pair: Any, kit: SimpleNamespace) -> None:
    held_pair.client.start(held_pair.order(held_pair.serve()))
    name = held_pair.prefill.next_order()
    held_pair.server.close()
    kit.eventually(lambda: bool(held_pair.decode.failed))
    assert held_pair.prefill.released == [name]


def test_two_decode_workers_and_two_prefill_workers_meet(kit: SimpleNamespace, transport: str) -> None:
    pairs = [kit.Pair(transport=transport) for _ in range(2)]
    try:
        endpoints = [pair.serve() for pair in pairs]
        for number in range(12):
            for pair in pairs:
                pair.client.start(pair.order(endpoints[number % 2], tokens=32, name=f"r{number}"))
        for pair in pairs:
            kit.eventually(lambda pair=pair: len(pair.decode.done) + len(pair.decode.failed) == 12)
            assert pair.decode.failed == []
            assert pair.arrived(0, 8)
            assert pair.client.stats().connections == 2
            kit.eventually(lambda pair=pair: len(pair.prefill.released) == 12)
    finally:
        for pair in pairs:
            pair.close()
