"""`python -m tandem_worker.model.lossless`: packed checkpoints, which give every bit back.

pack makes one of a model's folder, unpack the folder of one, verify reads all of one. The last line of stdout is one
JSON object. Exit code 0; 1 where something is damaged, different or cannot be read or written; 2 for what cannot be
asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from tandem_worker.model.checkpoint.packed_folder import FORMS, DamagedError
from tandem_worker.model.lossless.contract import DifferentError, Report, UsageError
from tandem_worker.model.lossless.packing import pack
from tandem_worker.model.lossless.unpacking import unpack, verify

_ENDING = (signal.SIGTERM, signal.SIGINT)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    options = _parser().parse_args(arguments)
    started = time.monotonic()
    try:
        with _cleaning_up():
            report = _run(options)
    except UsageError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except (DamagedError, DifferentError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except OSError as error:
        sys.stderr.write(f"A file cannot be read or written: {error}.\n")
        return 1
    sys.stdout.write(json.dumps(report.line(time.monotonic() - started)) + "\n")
    return 0


def _run(options: argparse.Namespace) -> Report:
    if options.command == "pack":
        return pack(options.source, options.target, options.form)
    if options.command == "unpack":
        return unpack(options.source, options.target)
    return verify(options.folder, options.against)


def _parser() -> argparse.ArgumentParser:
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m tandem_worker.model.lossless", description=summary, epilog=details, allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    making = commands.add_parser("pack", help="make a packed checkpoint", allow_abbrev=False)
    making.add_argument("source", type=Path, metavar="SOURCE", help="the model's folder: safetensors files and others")
    making.add_argument("target", type=Path, metavar="TARGET", help="a folder that is empty or not there yet")
    making.add_argument(
        "--form", required=True, choices=FORMS,
        help="fixed: 12 bits a weight, as workers multiply it; archive: the smallest, to download and to keep",
    )  # fmt: skip
    back = commands.add_parser("unpack", help="give every file of the source back", allow_abbrev=False)
    back.add_argument("source", type=Path, metavar="SOURCE", help="a packed checkpoint")
    back.add_argument("target", type=Path, metavar="TARGET", help="a folder that is empty or not there yet")
    check = commands.add_parser("verify", help="check every byte of a packed checkpoint", allow_abbrev=False)
    check.add_argument("folder", type=Path, metavar="FOLDER", help="a packed checkpoint")
    check.add_argument("--against", type=Path, metavar="ORIGINAL", help="the folder that it should give back")
    return parser


@contextlib.contextmanager
def _cleaning_up() -> Iterator[None]:
    """A signal that ends the program has it remove what is half done, and another one does not keep it from that."""
    before = {number: signal.signal(number, _stop) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    for ending in _ENDING:
        signal.signal(ending, signal.SIG_IGN)
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
