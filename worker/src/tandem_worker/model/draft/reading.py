"""Reads the tensors of a draft head into the forms that its model's matrices have."""

from __future__ import annotations

from tandem_worker.model.assembly.decoder import DecoderLM
from tandem_worker.model.backends.contract import Backend
from tandem_worker.model.checkpoint.contract import WeightSource
from tandem_worker.model.checkpoint.loader import WeightLoader


def build_loader(source: WeightSource, model: DecoderLM, backend: Backend, prefix: str = "") -> WeightLoader:
    """For a head of `model`, in its type, on its device, and in 12 bits a weight where it is. `prefix`: what the names
    of the checkpoint's tensors begin with."""
    lossless = backend.lossless if model.is_lossless else None
    make_packer = backend.packer if lossless is None else lossless.packer
    return WeightLoader(
        source,
        dtype=model.dtype,
        device=model.device,
        keeps_packed=backend.keeps_packed,
        prefix=prefix,
        packer=None if make_packer is None else make_packer(),
        shrink=None if lossless is None else lossless.shrink,
    )
