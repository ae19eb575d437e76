"""What a start leaves in the cache for those after it, without serving: the model's files, the tokenizer, the weights.

It runs the same steps as a start, as far as something of them is kept. A process that is killed leaves what a killed
start leaves: the next one goes on with the download, and what is half prepared is believed by nobody.
"""

from __future__ import annotations

import json
import logging
from typing import Literal

from tandem_api.keys import open_ring
from tandem_api.launch import WorkerConfig

from tandem_worker.host.environment import PodFacts
from tandem_worker.host.runtime import Runtime
from tandem_worker.host.vitals import Vitals
from tandem_worker.model.prepared.weights import PreparedWeights
from tandem_worker.process.build import list_start_steps
from tandem_worker.process.graph import run_steps
from tandem_worker.process.progress import StartProgress

logger = logging.getLogger(__name__)

StartPart = Literal["files", "weights"]
_STEPS: dict[StartPart, frozenset[str]] = {
    "files": frozenset({"fetch", "tokenizer"}),
    "weights": frozenset({
        "fetch", "tokenizer", "libraries", "device", "hashing", "digest", "seat", "prepared", "memory", "image",
        "weights",
    }),
}  # fmt: skip
"""Those of a start's steps that each part takes."""


def prewarm(config: WorkerConfig, pod: PodFacts, part: StartPart) -> None:
    """Fill the cache folder of `config`: with the verified files and the tokenizer, or with the weights too.

    Blocks until it is done. Raises StartupError as a start does. Weights for which there is no room, or which these
    kernels do not keep, are told in the log and are no error: workers prepare for themselves.
    """
    runtime = Runtime(host="127.0.0.1", peers=open_ring, api=open_ring, vitals=Vitals())
    progress = StartProgress()
    steps = [step for step in list_start_steps(config, pod, runtime, progress) if step.name in _STEPS[part]]
    results = run_steps(steps, progress)
    kept = "files and tokenizer"
    if part == "weights":
        prepared: PreparedWeights | None = results["prepared"]
        if prepared is not None and prepared.save():
            kept = "files, tokenizer and weights"
        else:
            logger.warning("no weights are kept: there is no room for them, or no kernels for a CPU use them")
    seconds = {name: round(taken, 3) for name, taken in progress.seconds().items()}
    logger.info("the cache has %s", kept, extra={"path": str(results["fetch"]), "seconds": seconds})
    if pod.termination_path.exists():
        pod.termination_path.write_text(json.dumps({"reason": "Prewarmed", "message": f"The cache has {kept}."}))
