"""How the files of a package lean on each other, counted: rooms, arrows between them, circles, long files and classes.

    python -m bench.rooms tandem_operator tandem_worker.server [--root FOLDER]
    python -m bench.rooms table [--root FOLDER]
    python -m bench.rooms entered tandem_operator --under Reconciler.reconcile tests/FILE.py::TEST
    python -m bench.rooms entered tandem_gateway --under Reception.on_request --until Gateway.on_exchange_end TEST

A room is what stands in the package's folder: a sub-package or a file. An arrow is an import from one room to another,
also inside a function or for types alone. Upward is one that the package's `layers` contract in pyproject.toml does not
allow. `--root` is another checkout, to compare with. `table` has a row for every package with such a contract, and what
is counted of the whole product. `entered` runs one test and names the package's files whose code
ran from the first call of a function on, or until another one has returned: what a reader has to open to follow it.
"""

from __future__ import annotations

import argparse
import ast
import sys
import threading
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
MOST_LINES, MOST_METHODS = 400, 15


def find_package(root: Path, package: str) -> Path:
    """Raises ValueError where no member of the workspace has it."""
    path = package.replace(".", "/")
    for folder in root.glob("*/src"):
        if (folder / path).is_dir():
            return folder / path
    raise ValueError(f"no folder {root}/*/src has {package}")


def read_modules(folder: Path) -> dict[str, ast.Module]:
    """Syntax trees by dotted name, without the package itself."""
    found: dict[str, ast.Module] = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(), str(path))
    return {name: tree for name, tree in found.items() if name}


def imports_of(package: str, tree: ast.Module, modules: Mapping[str, ast.Module]) -> Iterator[str]:
    """Modules of the package that a file names in an import, wherever in the file."""
    for node in ast.walk(tree):
        named: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            named = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        for full in named:
            if full.startswith(f"{package}."):
                name = full.removeprefix(f"{package}.")
                while name and name not in modules:
                    name = name.rpartition(".")[0]
                if name:
                    yield name


def read_ranks(root: Path, package: str) -> dict[str, int]:
    """The layer of each room, 0 the highest; empty where the package has no contract."""
    contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    for contract in contracts:
        if contract["type"] == "layers" and contract["containers"] == [package]:
            layers = [[room.strip(" ()") for room in layer.split("|")] for layer in contract["layers"]]
            return {room: rank for rank, layer in enumerate(layers) for room in layer}
    return {}


def find_circles(arrows: Mapping[str, set[str]]) -> list[set[str]]:
    """Strongly connected parts with more than one member: whoever reaches each other."""
    reached = {name: _reach(name, arrows) for name in arrows}
    circles: list[set[str]] = []
    for name in arrows:
        circle = {other for other in reached[name] if name in reached.get(other, set())}
        if len(circle | {name}) > 1 and circle not in circles:
            circles.append(circle)
    return circles


def _reach(start: str, arrows: Mapping[str, set[str]]) -> set[str]:
    seen, waiting = set[str](), [start]
    while waiting:
        for name in arrows.get(waiting.pop(), set()) - seen:
            seen.add(name)
            waiting.append(name)
    return seen


def list_classes(modules: Mapping[str, ast.Module]) -> list[str]:
    """Those with too many methods."""
    return sorted(
        f"{node.name} {methods}"
        for tree in modules.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and (methods := sum(isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)) for each in node.body))
        > MOST_METHODS
    )


def list_long(folder: Path) -> list[str]:
    """Files with too many lines."""
    lengths = {path.relative_to(folder): len(path.read_text().splitlines()) for path in folder.rglob("*.py")}
    return [f"{path} {lines}" for path, lines in sorted(lengths.items()) if lines > MOST_LINES]


def measure(root: Path, package: str) -> dict[str, str]:
    folder = find_package(root, package)
    modules = read_modules(folder)
    rooms = {name.split(".")[0] for name in modules}
    ranks = read_ranks(root, package) or read_ranks(ROOT, package)
    ranks = ranks if rooms <= ranks.keys() else {}
    files = {name: set(imports_of(package, tree, modules)) - {name} for name, tree in modules.items()}
    arrows = {(name.split(".")[0], other.split(".")[0]) for name, others in files.items() for other in others}
    between = {(one, other) for one, other in arrows if one != other}
    upward = {(one, other) for one, other in between if ranks and ranks[one] >= ranks[other]}
    paths, classes, long = list(folder.rglob("*.py")), list_classes(modules), list_long(folder)
    return {
        "files": str(len(paths)),
        "lines": str(sum(len(path.read_text().splitlines()) for path in paths)),
        "rooms": str(len(rooms)),
        "arrows between rooms": str(len(between)),
        "upward arrows": str(len(upward)) if ranks else "no order to tell by",
        "circles of rooms": str(len(find_circles({room: {o for r, o in between if r == room} for room in rooms}))),
        "circles of files": str(len(find_circles(files))),
        f"classes of more than {MOST_METHODS} methods": f"{len(classes)} {classes}",
        f"files of more than {MOST_LINES} lines": f"{len(long)} {long}",
    }


def list_packages(root: Path) -> list[str]:
    """Packages with a `layers` contract, those that hold others first."""
    contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    return sorted({name for each in contracts if each["type"] == "layers" for name in each["containers"]})


def print_table(root: Path) -> None:
    """The packages of this checkout, and those of `root` of the same name, as far as it has them."""
    columns = [
        "files",
        "lines",
        "rooms",
        "arrows between rooms",
        "upward arrows",
        "circles of rooms",
        "circles of files",
    ]
    print(_columns(["package", *(name.removesuffix(" between rooms") for name in columns)]))
    for package in list_packages(ROOT):
        try:
            found = measure(root, package)
        except ValueError:
            continue
        print(_columns([package, *(found[name].replace("no order to tell by", "none") for name in columns)]))
    parts = sorted(path.parent for path in root.glob("*/src/*/__init__.py"))
    counted = {part: (list_classes(read_modules(part)), list_long(part)) for part in parts}
    for title, which in (
        (f"classes of more than {MOST_METHODS} methods", 0),
        (f"files of more than {MOST_LINES} lines", 1),
    ):
        print(f"\n{title}: {sum(len(found[which]) for found in counted.values())}")
        for part, found in counted.items():
            print(f"  {part.name}: {', '.join(found[which]) or 'none'}")
    modules = [path for part in parts for path in part.rglob("*.py") if not path.stem.startswith("__")]
    tests = {path.name for path in (root / "tests").rglob("test_*.py")}
    tested = sum(f"test_{path.name}" in tests for path in modules)
    print(f"\nmodules with a test file of the same name: {tested} of {len(modules)}")


def _columns(cells: list[str]) -> str:
    return f"{cells[0]:32}" + "".join(f"{cell:>18}" for cell in cells[1:])


def list_entered(root: Path, package: str, *, under: str, test: str, until: str = "") -> list[str]:
    """Files of the package whose functions one test enters from the first call of `under` on; with `until`, up to the
    first return of that function.

    Raises ValueError where the test fails, or never calls it.
    """
    import pytest

    folder, entered, is_on, is_over = f"{find_package(root, package)}/", set[str](), False, False

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal is_on, is_over
        is_over = is_over or (is_on and event == "return" and frame.f_code.co_qualname == until)
        if event == "call" and not is_over:
            is_on = is_on or frame.f_code.co_qualname == under
            if is_on and frame.f_code.co_filename.startswith(folder) and frame.f_code.co_name != "<module>":
                entered.add(frame.f_code.co_filename.removeprefix(folder))

    sys.setprofile(profile)
    threading.setprofile(profile)
    try:
        status = pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", test])
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    if status or not entered:
        raise ValueError(f"{test} fails, or never calls {under}")
    return sorted(entered)


def main() -> None:
    parser = argparse.ArgumentParser(description="How the files of a package lean on each other.")
    parser.add_argument(
        "package", nargs="+", help="a package, or a package in one; or: table; or: entered PACKAGE TEST"
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout")
    parser.add_argument("--under", default="", help="with `entered`: count from the first call of this function on")
    parser.add_argument("--until", default="", help="with `entered`: and until this one has returned")
    given = parser.parse_intermixed_args()
    if given.package == ["table"]:
        print_table(given.root.resolve())
        return
    if given.package[0] == "entered":
        _, package, test = given.package
        found = list_entered(given.root.resolve(), package, under=given.under, test=test, until=given.until)
        print(f"{len(found)} files of {package}: {' '.join(found)}")
        return
    for package in given.package:
        print(package)
        for name, value in measure(given.root.resolve(), package).items():
            print(f"  {name}: {value}")


if __name__ == "__main__":
    main()
