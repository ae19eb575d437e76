"""What `tests/full.py` takes out of the gate is there, and a file never leaves it as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.full import FULL

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", FULL)
def test_what_is_left_to_the_full_run_exists(name: str) -> None:
    path, _, test = name.partition("::")
    function = test.partition("[")[0]
    assert f"def {function}(" in (ROOT / path).read_text(), f"tests/full.py names {name}: no such test"


def test_every_line_has_its_figure_and_reason() -> None:
    for name, reason in FULL.items():
        assert reason.partition(" ")[0].isdigit() or reason.startswith("as the"), name
        assert len(reason) > 15 or "as the one above" in reason, name
