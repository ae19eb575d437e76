"""Address ranges of clusters on one machine."""

from __future__ import annotations

from ipaddress import IPv4Network

import pytest

from e2e.cluster.binaries.network import SLOTS, Addresses, Namespace, parse_routes, plan_addresses
from e2e.cluster.errors import ClusterError


def test_no_two_slots_overlap() -> None:
    ranges = [network for slot in range(SLOTS) for network in Addresses(slot=slot).ranges]
    for number, network in enumerate(ranges):
        assert not any(network.overlaps(other) for other in ranges[number + 1 :])


def test_the_id_picks_the_slot_while_it_is_free() -> None:
    assert plan_addresses("00000a", []).slot == 10


def test_a_taken_slot_is_passed_over() -> None:
    taken = list(Addresses(slot=10).ranges)
    assert plan_addresses("00000a", taken).slot == 11


def test_the_search_wraps_around() -> None:
    last = Addresses(slot=SLOTS - 1)
    assert plan_addresses(f"{SLOTS - 1:06x}", [last.services]).slot == 0


def test_a_machine_whose_ranges_are_all_routed_elsewhere_is_told_so() -> None:
    with pytest.raises(ClusterError, match="disconnect the VPN"):
        plan_addresses("00000a", [IPv4Network("10.0.0.0/8")])


def test_the_api_service_has_the_first_address() -> None:
    assert Addresses(slot=1).api_service == "10.96.4.1"


def test_routes_are_read_without_the_default_route() -> None:
    text = '[{"dst": "default", "gateway": "192.0.2.1"}, {"dst": "10.96.0.0/22"}, {"dst": "10.88.0.1"}]'
    assert parse_routes(text) == [IPv4Network("10.96.0.0/22"), IPv4Network("10.88.0.1/32")]


def test_a_machine_without_routes_takes_nothing() -> None:
    assert parse_routes("") == []


def test_interface_names_fit_the_kernel() -> None:
    assert len(Namespace("abcdef").link) <= 15
