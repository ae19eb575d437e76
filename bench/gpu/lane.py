"""The process of a lane: its items one after another, each written down as it begins and ends.

python -m bench.gpu.lane LANE --events FILE --setting JSON [--skip N]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from bench.gpu.item import GOOD, AbsentError, Item, ItemStatus, Setting, WrongError

LOST = 75
"""Exit code of a lane whose device is lost: what it would run next could not be believed."""
_SHOWN = 1500
"""Characters of an error."""
_LOST_MARKS = ("CUDA error", "Triton Error [CUDA]", "CUBLAS_STATUS")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("lane")
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--setting", required=True)
    parser.add_argument("--skip", type=int, default=0, help="items that earlier processes took care of")
    options = parser.parse_args()
    threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
    setting = Setting(**json.loads(options.setting))
    with options.events.open("a") as events:
        items = load_items(options.lane, setting)
        write(events, event="plan", items=[item.name for item in items])
        results = dict(setting.results)
        for index, item in enumerate(items[options.skip :], start=options.skip):
            write(events, event="begin", item=index, name=item.name, limit=item.seconds, at=time.time())
            outcome = run_item(item, results)
            results[item.name] = outcome
            write(events, event="end", item=index, name=item.name, at=time.time(), **outcome)
            if outcome.get("lost"):
                # The context of the device is broken: leaving in order would wait for it, or fail again.
                os._exit(LOST)
    return 0


def end_with_parent(parent: int) -> None:
    """Whoever started this lane may be killed: then nobody is left to end it and what it has started."""
    while os.getppid() == parent:
        time.sleep(1.0)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)


def load_items(lane: str, setting: Setting) -> list[Item]:
    """The items of `module:function argument`; a module without a package is one of this one."""
    place, _, argument = lane.partition(" ")
    module, _, function = place.partition(":")
    build = getattr(import_module(module if "." in module else f"bench.gpu.{module}"), function)
    items: list[Item] = list(build(setting, argument) if argument else build(setting))
    names = [item.name for item in items]
    assert len(set(names)) == len(names), f"two items of {lane} have one name"
    return items


def write(events: TextIO, **fields: Any) -> None:
    events.write(json.dumps(plain(fields), default=str, allow_nan=False) + "\n")
    events.flush()


def plain(value: Any) -> Any:
    """What JSON can hold: a number that is none is written as a word."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def run_item(item: Item, results: Mapping[str, Any]) -> dict[str, Any]:
    """Status, seconds, figures and why; never raises."""
    missing = [name for name in item.needs if results.get(name, {}).get("status") not in GOOD]
    if missing:
        return {"status": ItemStatus.SKIPPED, "why": f"has not passed: {', '.join(missing[:3])}"}
    began = time.monotonic()
    outcome: dict[str, Any]
    try:
        outcome = {"status": ItemStatus.PASSED, "figures": item.run()}
    except WrongError as error:
        outcome = {"status": ItemStatus.FAILED, "why": str(error)[:_SHOWN], "figures": error.figures}
    except AbsentError as error:
        outcome = {"status": ItemStatus.ABSENT, "why": str(error)}
    except Exception as error:  # whatever it is belongs into the results, and the next item gets its turn
        lines = "".join(traceback.format_exception(error))
        outcome = {"status": ItemStatus.ERROR, "why": lines[-_SHOWN:], "lost": is_device_lost(error)}
    return outcome | {"seconds": round(time.monotonic() - began, 3)}


def is_device_lost(error: BaseException) -> bool:
    """A device error stays with the process: every later call fails, whatever it is.

    Memory that does not suffice is none.
    """
    torch = sys.modules.get("torch")
    if isinstance(error, getattr(torch, "OutOfMemoryError", ())):
        return False
    text = f"{type(error).__name__}: {error}"
    return isinstance(error, getattr(torch, "AcceleratorError", ())) or any(mark in text for mark in _LOST_MARKS)


if __name__ == "__main__":
    raise SystemExit(main())
