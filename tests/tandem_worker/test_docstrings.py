"""Every public function and method of the worker says what it does.

One that carries out what a documented base class or protocol asks for is described there. Protocols are met by
structure, so a class counts as one that meets a protocol when it has everything that the protocol names, and a method
as the protocol's when it has the same parameters.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import tandem_worker

SOURCE = Path(tandem_worker.__file__).parent
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Class:
    place: str
    name: str
    bases: list[str]
    methods: dict[str, Function] = field(default_factory=dict)
    members: set[str] = field(default_factory=set)
    """Methods, fields, and what `__init__` sets."""


def read_class(place: str, node: ast.ClassDef) -> Class:
    bases = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]
    found = Class(f"{place}:{node.lineno}", node.name, bases)
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            if not any(ast.unparse(decorator).endswith(".setter") for decorator in child.decorator_list):
                found.methods[child.name] = child
            if child.name == "__init__":
                found.members |= {
                    target.attr
                    for target in ast.walk(child)
                    if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store)
                }
        elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            found.members.add(child.target.id)
        elif isinstance(child, ast.Assign):
            found.members |= {target.id for target in child.targets if isinstance(target, ast.Name)}
    found.members |= found.methods.keys()
    return found


def list_above(known: dict[str, list[Class]], one: Class) -> Iterator[Class]:
    """The classes that `one` is derived from, as far as they are the worker's own."""
    for name in one.bases:
        for base in known.get(name, []):
            if base is not one:
                yield base
                yield from list_above(known, base)


def list_undocumented(sources: dict[str, str]) -> list[str]:
    """`place: name` of each public function without a docstring; `sources` are modules by their place."""
    trees = {place: ast.parse(text) for place, text in sources.items()}
    known: dict[str, list[Class]] = defaultdict(list)
    missing: list[str] = []
    for place, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                known[node.name].append(read_class(place, node))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and is_bare(node):
                missing.append(f"{place}:{node.lineno}: {node.name}")
    classes = [one for same in known.values() for one in same]
    lineage = {id(one): [one, *list_above(known, one)] for one in classes}
    members = {id(one): set[str]().union(*(each.members for each in lineage[id(one)])) for one in classes}
    protocols = [one for one in classes if "Protocol" in one.bases]
    for one in classes:
        if one.name.startswith("_"):
            continue
        met = [each for each in protocols if each is not one and members[id(each)] <= members[id(one)]]
        described = [each for protocol in met for each in lineage[id(protocol)]]
        for name, method in one.methods.items():
            above = [each.methods.get(name) for each in lineage[id(one)][1:]]
            above += [each.methods.get(name) for each in described if has_parameters(each.methods.get(name), method)]
            if is_bare(method) and not any(map(is_told, above)):
                missing.append(f"{one.place.partition(':')[0]}:{method.lineno}: {one.name}.{name}")
    return missing


def is_bare(function: Function) -> bool:
    return not function.name.startswith("_") and ast.get_docstring(function) is None


def has_parameters(function: Function | None, other: Function) -> bool:
    """Whether both take the same, by the names of their parameters."""
    return function is not None and list_parameters(function) == list_parameters(other)


def list_parameters(function: Function) -> list[str]:
    arguments = function.args
    return [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def is_told(function: Function | None) -> bool:
    return function is not None and ast.get_docstring(function) is not None


def test_public_functions_have_docstrings() -> None:
    sources = {str(path.relative_to(SOURCE)): path.read_text() for path in sorted(SOURCE.rglob("*.py"))}
    assert len(sources) > 100
    assert list_undocumented(sources) == []


PROTOCOL = '''
class Store(Protocol):
    size: int
    def read(self):
        """The oldest."""
    def write(self, value): ...
'''


def test_what_a_documented_protocol_or_base_describes_needs_no_words() -> None:
    sources = {
        "a.py": PROTOCOL,
        "b.py": "class Disk:\n  size: int\n  def read(self): ...\n  def write(self, value): ...\n",
        "c.py": "class Tape(Disk):\n  def read(self): ...\n",
        "d.py": "class Book:\n  def read(self): ...\n  def _turn(self): ...\ndef find(): ...\ndef _find(): ...\n",
        "e.py": "class _Leaf:\n  def read(self): ...\n",
        "f.py": "class Slate:\n  size: int\n  def read(self, page): ...\n  def write(self, value): ...\n",
    }
    assert list_undocumented(sources) == [
        "d.py:4: find",
        "a.py:6: Store.write",
        "b.py:4: Disk.write",
        "d.py:2: Book.read",
        "f.py:3: Slate.read",
        "f.py:4: Slate.write",
    ]
