"""Whom a connection belongs to, by its address."""

from __future__ import annotations

from typing import Any

import pytest
from tandem_gateway.http.connection import read_source


@pytest.mark.parametrize(
    ("peer", "source"),
    [
        (("10.1.2.3", 4), "10.1.2.3"),
        (("::ffff:10.1.2.3", 4, 0, 0), "10.1.2.3"),
        (("2001:db8:0:1:aaaa::1", 4, 0, 0), "2001:db8:0:1::"),
        (("2001:db8:0:1:bbbb::2", 4, 0, 0), "2001:db8:0:1::"),
        (("fe80::1%eth0", 4, 0, 2), "fe80::"),
        (None, ""),
        ("", ""),
        (("nonsense",), ""),
    ],
)
def test_an_address_is_one_source_and_so_is_half_an_ipv6_one(peer: Any, source: str) -> None:
    assert read_source(peer) == source
