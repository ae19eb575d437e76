"""What ends a process that serves: a signal, another pod of its group, or the loss of one."""

from __future__ import annotations

import asyncio
import logging
import os
import signal

from tandem_worker.group.control.link import Loss
from tandem_worker.process.progress import Switches

logger = logging.getLogger("tandem_worker")


class Stop:
    """On the event loop."""

    def __init__(self, switches: Switches) -> None:
        self.asked = asyncio.Event()
        """The process is to finish what is running and end."""
        self.loss: Loss | None = None
        """Why it cannot finish; None: it can."""
        self._switches = switches

    def lose(self, cause: Loss) -> None:
        """The group, or the engine, is lost."""
        self.loss = cause
        self._switches.draining = True
        self.asked.set()

    def leave(self) -> None:
        """Another pod of the group must end. That ends the group, so finish what is running."""
        if self._switches.ready and not self._switches.draining:
            self._on_signal()

    def handle_signals(self, *, starting: bool) -> None:
        """SIGTERM ends a process that starts by itself: Python hears nothing while a library that is loaded holds the
        interpreter's lock, which takes seconds from a slow disk. The kernel keeps it from process 1 alone."""
        numbers = [signal.SIGINT] if starting and os.getpid() != 1 else [signal.SIGINT, signal.SIGTERM]
        for number in numbers:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if not self._switches.ready or self._switches.draining:
            # Nothing to finish yet, or somebody is in a hurry. The loading thread cannot be interrupted otherwise.
            logger.info("ending at once")
            logging.shutdown()
            os._exit(0 if not self._switches.ready else 1)
        self._switches.draining = True
        self.asked.set()
