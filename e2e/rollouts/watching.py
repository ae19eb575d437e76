"""Follows the pods of a model and the logs of its decode workers, by kubectl."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from tandem_api.names import LABEL_MODEL, Role

from e2e.rollouts.evidence import Evidence
from e2e.suite.fleet import Fleet, Object

REFUSED = "revision differs"
"""In the log line of a decode worker whose peer refused it (`Identity.refusal`)."""


class Watch:
    """Feeds `evidence` with every event of the model's pods until it is stopped."""

    def __init__(self, fleet: Fleet, model: str, evidence: Evidence, logs: Path) -> None:
        self.fleet, self.model, self.evidence, self.logs = fleet, model, evidence, logs
        self._followed: dict[str, subprocess.Popen[bytes]] = {}
        self._since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._stopping = False
        self._failure: Exception | None = None
        self._process = self._kubectl(
            "get", "pods", "-l", f"{LABEL_MODEL}={model}", "--watch", "--output-watch-events", "-o", "json",
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._work, name="watch")

    def _kubectl(self, *arguments: str, **options: Any) -> subprocess.Popen[Any]:
        cluster = self.fleet.cluster
        command = [str(cluster.kubectl_path), "--kubeconfig", str(cluster.kubeconfig), "-n", self.fleet.namespace]
        return subprocess.Popen([*command, *arguments], **options)

    def start(self) -> None:
        self.logs.mkdir(parents=True, exist_ok=True)
        self._thread.start()

    def stop(self) -> None:
        """Raises RuntimeError where the watch had ended before: what it did not see cannot be judged."""
        ended = self._process.poll() is not None
        self._stopping = True
        self._process.terminate()
        self._process.wait()
        self._thread.join()
        for follower in self._followed.values():
            follower.terminate()
            follower.wait()
        if self._failure is not None:
            raise self._failure
        if ended:
            raise RuntimeError("the watch of pods ended before the rollout did")

    def refused(self) -> int:
        """Times that a decode worker's log says that a peer of another build refused it."""
        return sum(path.read_text(errors="replace").count(REFUSED) for path in self.logs.glob("*.log"))

    def _work(self) -> None:
        try:
            assert self._process.stdout is not None
            for line in self._process.stdout:  # kubectl writes one event a line
                self._take(json.loads(line))
        except Exception as error:  # told by `stop`
            if not self._stopping:
                self._failure = error

    def _take(self, event: Object) -> None:
        if event["type"] == "ERROR":
            raise RuntimeError(f"the watch of pods: {event['object']}")
        if event["type"] != "BOOKMARK":
            self.evidence.see(event["type"], event["object"], time.monotonic())
            self._follow(event["object"])

    def _follow(self, pod: Object) -> None:
        """The log of a decode worker from when the watch began."""
        life = self.evidence.lives.get(pod["metadata"]["uid"])
        if life is None or life.role != Role.DECODE or life.able is None or pod["metadata"]["uid"] in self._followed:
            return
        with (self.logs / f"{life.name}-{pod['metadata']['uid'][:8]}.log").open("wb") as file:
            self._followed[pod["metadata"]["uid"]] = self._kubectl(
                "logs",
                "--follow",
                f"--since-time={self._since}",
                life.name,
                "-c",
                "worker",
                stdout=file,
                stderr=subprocess.STDOUT,
            )
