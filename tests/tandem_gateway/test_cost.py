"""What a short request costs, in what no busy machine can blur: calls of Python functions."""

from __future__ import annotations

import pytest

from bench.gateway.calls import count_calls


@pytest.mark.parametrize(("pairs", "most"), [(False, 96), (True, 105)], ids=["decode", "prefill and decode"])
async def test_a_short_request_takes_few_calls(pairs: bool, most: int) -> None:
    """A few more than it takes: who needs more should know that every request pays for it."""
    assert await count_calls(pairs=pairs) <= most
