"""The wheels that travel to a machine with a GPU: what is missing there, at the lock's versions, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

from bench.gpu.bundle import (
    MAX_BYTES,
    RENEWED,
    BundleError,
    Wheel,
    check_needs,
    download,
    plan_bundle,
    read_machine,
    read_requirements,
    supported_tags,
    verify,
)

ROOT = Path(__file__).parents[3]
MACHINE = read_machine((ROOT / "bench/gpu/machine.txt").read_text())
LOCK = tomllib.loads((ROOT / "uv.lock").read_text())
MODULES = ("pydantic", "orjson", "httptools", "starlette", "uvicorn", "llguidance", "gguf", "pytest_asyncio")


def test_the_plan_holds_what_is_missing_there_and_nothing_that_is_built_for_its_driver() -> None:
    wheels = {wheel.name: wheel for wheel in plan_bundle(LOCK, MACHINE)}
    assert {name.replace("_", "-") for name in MODULES} <= wheels.keys()
    assert set(wheels) & MACHINE.keys() == RENEWED
    assert not [name for name in wheels if name.startswith(("torch", "triton", "numpy", "nvidia", "transformers"))]
    tags = set(supported_tags())
    for wheel in wheels.values():
        assert parse_wheel_filename(wheel.file)[3] & tags, wheel.file
        assert wheel.hash.startswith("sha256:")


def test_every_dependency_in_the_lock_is_in_the_plan_or_on_the_machine() -> None:
    planned = {wheel.name for wheel in plan_bundle(LOCK, MACHINE)}
    members = set(LOCK["manifest"]["members"])
    packages = {package["name"]: package for package in LOCK["package"]}
    for name in [*planned, "tandem-worker", "tandem-api"]:
        needed = {each["name"] for each in packages[name].get("dependencies", []) if "< '3.12'" not in str(each)}
        assert needed <= planned | MACHINE.keys() | members


def test_what_the_worker_asks_of_the_machine_is_met() -> None:
    """Where its version is known: torch and Triton of the machine are older than the lock's."""
    worker = tomllib.loads((ROOT / "worker/pyproject.toml").read_text())["project"]["dependencies"]
    wanted = [
        each for each in map(Requirement, worker) if each.name in ("torch", "triton", "transformers", "safetensors")
    ]
    assert len(wanted) == 4
    assert check_needs("tandem-worker", wanted, MACHINE) == []


def test_a_requirement_that_is_not_met_is_refused() -> None:
    present = {"here": "1.0", "unknown": None}
    assert check_needs("x", [Requirement("here>=1"), Requirement("unknown>=3")], present) == ["x needs unknown>=3"]
    with pytest.raises(BundleError, match=r"x needs here>=2, but there is 1.0"):
        check_needs("x", [Requirement("here>=2")], present)
    with pytest.raises(BundleError, match="neither the bundle nor the machine"):
        check_needs("x", [Requirement("gone")], present)


def test_a_lock_without_a_wheel_that_fits_is_refused() -> None:
    package = {
        "name": "pytest",
        "version": "1",
        "wheels": [{"url": "x/pytest-1-cp311-cp311-win_amd64.whl", "hash": ""}],
    }
    others = [{"name": name, "version": "1"} for name in ("tandem-worker",)]
    lock = {"manifest": {"members": ["tandem-worker"]}, "package": [package, *others]}
    with pytest.raises(BundleError, match=r"no wheel of pytest 1 for CPython 3\.12"):
        plan_bundle(lock, {"pytest-asyncio": None, "pytest-timeout": None, "hypothesis": None})


def make_wheel(folder: Path, name: str, requires: str = "") -> Wheel:
    import hashlib

    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        lines = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n" + (
            f"Requires-Dist: {requires}\n" if requires else ""
        )
        archive.writestr(f"{name}-1.0.dist-info/METADATA", lines)
    return Wheel(name, "1.0", f"https://x/{path.name}", "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest())


def test_a_folder_is_what_the_plan_says(tmp_path: Path) -> None:
    wheels = [make_wheel(tmp_path, "one", "two>=1; python_version >= '3.12'"), make_wheel(tmp_path, "two", "far<2")]
    assert verify(tmp_path, wheels, {"far": None}) == ["two needs far<2"]
    with pytest.raises(BundleError, match="two needs far<2, but there is 2"):
        verify(tmp_path, wheels, {"far": "2"})
    with pytest.raises(BundleError, match="one would replace"):
        verify(tmp_path, wheels, {"far": None, "one": None})
    with (tmp_path / wheels[0].file).open("ab") as file:
        file.write(b"x")
    with pytest.raises(BundleError, match=r"one-1.0-py3-none-any.whl is not the file of uv.lock"):
        verify(tmp_path, wheels, {"far": None})
    with pytest.raises(BundleError, match=r"does not hold what uv.lock says: two"):
        verify(tmp_path, wheels[:1], {"far": None})


def find_python() -> str | None:
    """An interpreter of the machine's version."""
    candidates = [
        sys.executable,
        shutil.which("python3.12"),
        *map(str, Path.home().glob(".pyenv/versions/3.12*/bin/python")),
    ]
    for each in filter(None, candidates):
        probe = [each, "-c", "import sys; sys.exit(sys.version_info[:2] != (3, 12))"]
        if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
            return each
    return None


@pytest.mark.full
@pytest.mark.timeout(600)
def test_it_builds_fits_and_imports_beside_what_the_machine_has(tmp_path: Path) -> None:
    """From the registry, into an environment of 3.12 that has what bundled packages take from the machine."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "pip")], check=True) if not has_pip() else None
    pip = [sys.executable if has_pip() else str(tmp_path / "pip/bin/python"), "-m", "pip"]
    wheels = plan_bundle(LOCK, MACHINE)
    folder = tmp_path / "wheels"
    download(wheels, folder, pip)
    unknown = verify(folder, wheels, MACHINE)
    assert sum(path.stat().st_size for path in folder.iterdir()) < MAX_BYTES
    python = find_python()
    if python is None:
        pytest.skip("no Python 3.12 is at hand: tags, hashes and dependencies were compared, nothing was imported")
    there = tmp_path / "there"
    subprocess.run([python, "-m", "venv", str(there)], check=True)
    brought = {wheel.name for wheel in wheels}
    taken = {each.name.lower() for wheel in folder.iterdir() for each in read_requirements(wheel)} - brought
    pinned = [f"{name}=={MACHINE[name]}" if MACHINE.get(name) else name for name in sorted(taken)]
    assert len(unknown) >= 5
    subprocess.run([there / "bin/python", "-m", "pip", "install", "--quiet", *pinned], check=True)
    site = tmp_path / "site"
    command = [
        there / "bin/python", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile",
        "--no-cache-dir", "--upgrade", "--target", site, *sorted(folder.iterdir()),
    ]  # fmt: skip
    subprocess.run(command, check=True, env=os.environ | {"PIP_CONFIG_FILE": os.devnull})
    environment = os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{ROOT / 'api/src'}"}
    names = [*MODULES, "typing_extensions", "tandem_api.launch"]
    script = "; ".join(f"import {name}" for name in names) + "; print(pydantic.__file__, typing_extensions.__file__)"
    done = subprocess.run(
        [there / "bin/python", "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(str(site)) == 2


def has_pip() -> bool:
    return subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0
