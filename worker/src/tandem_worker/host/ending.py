"""The end of a process that cannot go on."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from typing import NoReturn

from tandem_worker.host.environment import PodFacts

logger = logging.getLogger(__name__)


def end_process(pod: PodFacts, reason: str, message: str) -> NoReturn:
    """Tell the operator, through the kubelet, and a person, through the log. Exits with status 1."""
    logger.critical("the worker ends: %s", message, extra={"reason": reason})
    if pod.termination_path.exists():  # the kubelet makes it; outside Kubernetes there is none
        with contextlib.suppress(OSError):
            pod.termination_path.write_text(json.dumps({"reason": reason, "message": message[:3000]}))
    logging.shutdown()
    sys.stderr.flush()
    os._exit(1)  # threads of torch or of a half-built engine must not keep the pod from restarting
