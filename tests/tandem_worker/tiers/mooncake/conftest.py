"""Every test here runs Mooncake's programs."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _alone(loopback_alone: None) -> None:
    """In a network with nothing but loopback."""
