"""A docstring can be read without the name above it: it begins with what the thing is or does.

`Of those.` below a field, or `Where it goes.` below a function, parse only together with the line before, which whoever
reads a tooltip, a field's description in the CRD or a generated page does not see.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import tandem_api
import tandem_gateway
import tandem_operator
import tandem_sim
import tandem_worker

PACKAGES = [tandem_api, tandem_gateway, tandem_operator, tandem_sim, tandem_worker]
OPENINGS = frozenset(("Of", "That", "By", "Whose", "Where"))


def list_docstrings(text: str) -> Iterator[tuple[int, str]]:
    """Line and text of the docstrings of modules, classes and functions, and of those below fields and constants."""
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        for each in body if isinstance(body, list) else ():
            if (
                isinstance(each, ast.Expr)
                and isinstance(each.value, ast.Constant)
                and isinstance(each.value.value, str)
            ):
                yield each.lineno, each.value.value


def list_refused(text: str) -> list[int]:
    """Lines of the docstrings that begin with one of `OPENINGS`."""
    return [line for line, words in list_docstrings(text) if "".join(words.split()[:1]).rstrip(",.:;") in OPENINGS]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_docstrings_begin_with_what_they_tell(package: object) -> None:
    source = Path(package.__file__).parent
    files = sorted(source.rglob("*.py"))
    assert len(files) > 10
    found = [f"{path.relative_to(source)}:{line}" for path in files for line in list_refused(path.read_text())]
    assert found == [], f"docstrings begin with one of {sorted(OPENINGS)}: say what the thing is or does"


def test_all_kinds_of_docstrings_are_looked_at() -> None:
    lines = [
        '"""Whose module."""',
        "LIMIT = 1",
        '"""Of it."""',
        "class Box:",
        '    """Of wood."""',
        "    size: int = 0",
        '    """By weight; rounded."""',
        "    def __init__(self):",
        "        self.place = 1",
        '        """Where, in the room."""',
        "    async def find(self):",
        '        """',
        "        That which was lost.",
        '        """',
        "def seek():",
        '    """Offers. Of all, the best. Whereabouts. Bypass."""',
        "    return 'Of course'",
    ]
    assert sorted(list_refused("\n".join(lines))) == [1, 3, 5, 7, 10, 12]
