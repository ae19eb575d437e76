"""Fixtures of tests in which Mooncake runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.mooncake.network import own_network


@contextlib.contextmanager
def try_own_network(*, required: bool) -> Iterator[None]:
    """Inside, or where it cannot be made: outside, or not at all."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(own_network())
        except PermissionError as error:
            if required:
                pytest.skip(f"Mooncake listens on all addresses, and a network of its own cannot be made ({error})")
        yield


@pytest.fixture
def loopback_alone(request: pytest.FixtureRequest) -> Iterator[None]:
    """The test is in a network with nothing but loopback; what runs no Mooncake goes on where none can be made."""
    name = request.node.nodeid.lower()
    with try_own_network(required="mooncake" in name or "store" in name):
        yield


@pytest.fixture(scope="module")
def module_on_loopback_alone() -> Iterator[None]:
    """All tests of the module are in a network with nothing but loopback."""
    with try_own_network(required=True):
        yield
