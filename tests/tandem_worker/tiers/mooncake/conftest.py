"""Every test here runs Mooncake's programs."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _alone(module_on_loopback_alone: None) -> None:
    """In a network with nothing but loopback; holders that tests of a module share are there too."""
