"""The packages that a machine with a GPU lacks, as wheels at the lock file's versions and hashes.

    make gpu-bundle

Such a machine has no network. `machine.txt` lists what it brings along; what the worker and the GPU tests need besides
is taken from `uv.lock`, for CPython 3.12 on x86-64. What is there is not replaced: torch, Triton and numpy are built
for its driver.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path
from typing import Any

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".wheels"
MAX_BYTES = 60 << 20
"""A working tree travels to such a machine in 64 MiB, and this is the largest part of it."""
NEEDED = ("tandem-worker", "pytest", "pytest-asyncio", "pytest-timeout", "hypothesis")
"""What is run there needs these, and what they depend on."""
RENEWED = frozenset({"typing-extensions"})
"""Brought along though the machine has it: pydantic asks for the newest, and it is one file of plain Python."""
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)] + [
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
]
ENVIRONMENT = {
    "implementation_name": "cpython", "implementation_version": "3.12.3", "os_name": "posix",
    "platform_machine": "x86_64", "platform_python_implementation": "CPython", "platform_release": "",
    "platform_system": "Linux", "platform_version": "", "python_full_version": "3.12.3", "python_version": "3.12",
    "sys_platform": "linux", "extra": "",
}  # fmt: skip


class BundleError(Exception):
    """The bundle cannot be made, or is not what it must be."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """A file of the lock."""

    name: str
    version: str
    url: str
    hash: str

    @property
    def file(self) -> str:
        return self.url.rsplit("/", 1)[1]


def read_machine(text: str) -> dict[str, str | None]:
    """What the machine has, by normalized name; None where its version is not known."""
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    pairs = (line.partition("==") for line in lines if line)
    return {canonicalize_name(name): version or None for name, _, version in pairs}


def supported_tags() -> list[Tag]:
    """Of wheels that CPython 3.12 on that machine loads, best first."""
    platforms = [*PLATFORMS, "linux_x86_64"]
    return [
        *cpython_tags((3, 12), platforms=platforms),
        *compatible_tags((3, 12), interpreter="cp312", platforms=platforms),
    ]


def plan_bundle(lock: Mapping[str, Any], machine: Mapping[str, str | None]) -> list[Wheel]:
    """The wheels that the machine lacks, by name. Raises BundleError where the lock has none that fits."""
    packages: dict[str, list[Mapping[str, Any]]] = {}
    for package in lock["package"]:
        packages.setdefault(package["name"], []).append(package)
    ranks = {tag: rank for rank, tag in enumerate(supported_tags())}
    members = set(lock["manifest"]["members"])
    wheels: dict[str, Wheel] = {}
    seen: set[str] = set()
    queue: list[tuple[str, str | None]] = [(name, None) for name in NEEDED]
    while queue:
        name, version = queue.pop()
        if name in seen or (name in machine and name not in RENEWED):
            continue  # what the machine has brings what it needs itself
        seen.add(name)
        package = _find(packages[name], version)
        queue += [
            (dependency["name"], dependency.get("version"))
            for dependency in package.get("dependencies", [])
            if "marker" not in dependency or Marker(dependency["marker"]).evaluate(ENVIRONMENT)
        ]
        if name not in members:
            wheels[name] = _choose(package, ranks)
    return [wheels[name] for name in sorted(wheels)]


def _find(candidates: Sequence[Mapping[str, Any]], version: str | None) -> Mapping[str, Any]:
    """The package, of several the version that a dependency names."""
    return next(package for package in candidates if version is None or package["version"] == version)


def _choose(package: Mapping[str, Any], ranks: Mapping[Tag, int]) -> Wheel:
    best: tuple[int, Wheel] | None = None
    for entry in package.get("wheels", []):
        wheel = Wheel(package["name"], package["version"], entry["url"], entry["hash"])
        fitting = [ranks[tag] for tag in parse_wheel_filename(wheel.file)[3] if tag in ranks]
        if fitting and (best is None or min(fitting) < best[0]):
            best = (min(fitting), wheel)
    if best is None:
        raise BundleError(f"uv.lock has no wheel of {package['name']} {package['version']} for CPython 3.12 on x86-64")
    return best[1]


def download(wheels: Sequence[Wheel], folder: Path, pip: Sequence[str]) -> None:
    """Fetch exactly these files; what else is in the folder is removed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    platforms = [option for platform in PLATFORMS for option in ("--platform", platform)]
    abis = [option for abi in ("cp312", "abi3", "none") for option in ("--abi", abi)]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as wanted:
        wanted.writelines(f"{wheel.name}=={wheel.version} --hash={wheel.hash}\n" for wheel in wheels)
        wanted.flush()
        command = [
            *pip, "download", "--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes", "--python-version",
            "3.12", "--implementation", "cp", *abis, *platforms, "--dest", str(folder), "--requirement", wanted.name,
        ]  # fmt: skip
        if subprocess.run(command, check=False).returncode:
            raise BundleError("pip could not download the wheels; it says why above")


def verify(folder: Path, wheels: Sequence[Wheel], machine: Mapping[str, str | None]) -> list[str]:
    """The dependencies of which the machine's version is not known: it checks them itself, in its first stage.

    Raises BundleError when a file is missing, too many, not the lock's, replaces what the machine has, or depends on
    what neither the bundle nor the machine has, and when all of them are too large.
    """
    files = {path.name: path for path in folder.glob("*")}
    if set(files) != {wheel.file for wheel in wheels}:
        odd = ", ".join(sorted(set(files) ^ {wheel.file for wheel in wheels}))
        raise BundleError(f"{folder.name} does not hold what uv.lock says: {odd}")
    for wheel in wheels:
        if "sha256:" + hashlib.sha256(files[wheel.file].read_bytes()).hexdigest() != wheel.hash:
            raise BundleError(f"{wheel.file} is not the file of uv.lock: its hash differs")
        if wheel.name in machine and wheel.name not in RENEWED:
            raise BundleError(f"{wheel.name} would replace what the machine has")
    size = sum(path.stat().st_size for path in files.values())
    if size > MAX_BYTES:
        raise BundleError(f"the wheels take {size / 2**20:.1f} MiB, more than {MAX_BYTES >> 20}")
    bundled: dict[str, str | None] = {wheel.name: wheel.version for wheel in wheels}
    unknown: list[str] = []
    for wheel in wheels:
        unknown += check_needs(wheel.name, read_requirements(files[wheel.file]), {**machine, **bundled})
    return unknown


def read_requirements(wheel: Path) -> list[Requirement]:
    """What a wheel asks for on that machine, extras left out."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        found = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []
    wanted = [Requirement(line) for line in found]
    return [each for each in wanted if each.marker is None or each.marker.evaluate(ENVIRONMENT)]


def check_needs(name: str, wanted: Iterable[Requirement], present: Mapping[str, str | None]) -> list[str]:
    """Requirements that cannot be judged as the version is not known. Raises BundleError for one that is not met."""
    unknown: list[str] = []
    for each in wanted:
        needed = canonicalize_name(each.name)
        if needed not in present:
            raise BundleError(f"{name} needs {each}, which neither the bundle nor the machine has")
        version = present[needed]
        if version is None:
            unknown.append(f"{name} needs {each}")
        elif Version(version) not in each.specifier:
            raise BundleError(f"{name} needs {each}, but there is {version}")
    return unknown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pip", default=f"{sys.executable} -m pip", help="a pip that downloads")
    parser.add_argument("--verify", action="store_true", help="only check what is in the folder")
    options = parser.parse_args()
    machine = read_machine((ROOT / "bench/gpu/machine.txt").read_text())
    try:
        wheels = plan_bundle(tomllib.loads((ROOT / "uv.lock").read_text()), machine)
        if not options.verify:
            download(wheels, FOLDER, options.pip.split())
        unknown = verify(FOLDER, wheels, machine)
    except BundleError as error:
        print(f"The bundle is not good: {error}.", file=sys.stderr)
        return 1
    size = sum(path.stat().st_size for path in FOLDER.iterdir())
    print(f"{FOLDER.name}/: {len(wheels)} wheels, {size / 2**20:.1f} MiB")
    for wheel in wheels:
        print(f"  {wheel.file}")
    for line in unknown:
        print(f"  of unknown version on the machine: {line}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
