"""What the worker's memory holds, by what it is for: of the process, or on a GPU of the device."""

from __future__ import annotations

import resource
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem_worker.model.backends.form import FormChoice
    from tandem_worker.model.checkpoint.image import Image
    from tandem_worker.model.weighing import Matrices


@dataclass(slots=True)
class MemoryLedger:
    """Bytes by what they hold. `kv` is reserved: on a CPU it takes memory as blocks are used."""

    on_gpu: bool
    by_kind: dict[str, int] = field(default_factory=dict)
    matrices: dict[str, Matrices] = field(default_factory=dict)
    """Matrices of the weights, by form."""
    weights: FormChoice | None = None
    """In which form they are kept, and why; None until they are read."""
    image: Image | None = None
    """What was in the device's memory before torch was: what is kept of it is weights."""

    def note_choice(self, choice: FormChoice) -> None:
        """As the loader has decided."""
        self.weights = choice

    def observe_other(self) -> int:
        """What is held and no other kind's: of the process, or on a GPU the driver's and the libraries' share."""
        if not self.on_gpu:
            return max(0, _resident_bytes() - self.by_kind.get("weights", 0))
        import torch

        free, total = torch.cuda.mem_get_info()
        kept = 0 if self.image is None else self.image.num_bytes
        return max(0, total - free - torch.cuda.memory_reserved() - kept)


def _resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * resource.getpagesize()
