"""What a holder's container and the worker beside it leave for each other: a folder that both see.

The container says why its program does not run, and that itself lives; a worker that can make no call may ask for the
program to be started again.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import orjson

logger = logging.getLogger(__name__)

_SAID, _ALIVE, _RESTART = "said", "alive", "restart"
_MOST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Note:
    reason: str
    """CamelCase."""
    message: str


class Notes:
    """Raises OSError where the folder cannot be written, but `read` never."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def alive_path(self) -> Path:
        """File that is as new as the container's last look at its program."""
        return self._folder / _ALIVE

    # -- the container -------------------------------------------------------------------------------------------------

    def say(self, note: Note | None) -> None:
        """Why the program cannot be used; None: nothing is known against it."""
        path = self._folder / _SAID
        if note is None:
            path.unlink(missing_ok=True)
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(".new")
        fresh.write_bytes(orjson.dumps([note.reason, note.message[: _MOST_BYTES // 4]]))
        os.replace(fresh, path)

    def touch(self) -> None:
        """The container has looked."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self.alive_path.touch()

    def take_restart(self) -> bool:
        """Whether the worker has asked for it since the last time."""
        try:
            (self._folder / _RESTART).unlink()
        except FileNotFoundError:
            return False
        return True

    # -- the worker ----------------------------------------------------------------------------------------------------

    def read(self) -> Note | None:
        """What the container said last; None: nothing, or there is no container that says anything."""
        try:
            with (self._folder / _SAID).open("rb") as file:
                reason, message = orjson.loads(file.read(_MOST_BYTES))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            logger.warning("what the container of the store says cannot be read", extra={"error": str(error)})
            return None
        return Note(str(reason), str(message))

    def ask_restart(self) -> bool:
        """The program is to be started again. False: nobody is there who could."""
        if not self.alive_path.exists():
            return False
        (self._folder / _RESTART).touch()
        return True
