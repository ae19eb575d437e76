"""The one way to get a model: from a folder or a file to a `CausalLM`."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tandem_api.launch import WeightsForm

from tandem_worker.host.errors import StartupError
from tandem_worker.model.assembly.build import Build
from tandem_worker.model.backends import native
from tandem_worker.model.backends.contract import Backend, BackendName
from tandem_worker.model.backends.form import Footprint, FormChoice, Rows, choose_form
from tandem_worker.model.backends.select import find_backend, select_backend
from tandem_worker.model.checkpoint.bare import BareSource
from tandem_worker.model.checkpoint.contract import WeightSource
from tandem_worker.model.checkpoint.files import find_gguf, find_safetensors, is_packed
from tandem_worker.model.checkpoint.gguf import GGUFSource, gguf_metadata, open_gguf
from tandem_worker.model.checkpoint.loader import WeightLoader
from tandem_worker.model.checkpoint.quantized import dequantize_source
from tandem_worker.model.checkpoint.safetensors import SafetensorsSource
from tandem_worker.model.config import CONFIG_FILE, ModelConfig, parse_config, read_architecture, read_raw_config
from tandem_worker.model.contract import CausalLM
from tandem_worker.model.coverage import EMBEDDING, check_coverage, settle_output_matrix
from tandem_worker.model.embedding import MODULES, read_embedding_spec
from tandem_worker.model.families.registry import find_family
from tandem_worker.model.gguf_keys import gguf_architecture, translate_metadata
from tandem_worker.model.prepared.weights import PreparedWeights
from tandem_worker.parallel.context import SINGLE, ParallelContext

if TYPE_CHECKING:
    from tandem_worker.model.checkpoint.image import Image
    from tandem_worker.model.checkpoint.upload import Uploads

logger = logging.getLogger(__name__)

ANY_ROWS = Rows(1, 2048)
"""Rows that products have in a worker that decodes and prefills."""
_BARE_EMBEDDING = "embed_tokens.weight"
_LANGUAGE_MODEL = "language_model."


def load_model(
    path: Path,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    context: ParallelContext = SINGLE,
    backend: BackendName | None = None,
    max_threads: int | None = None,
    prepared: PreparedWeights | None = None,
    weights: WeightsForm = "Auto",
    rows: Rows = ANY_ROWS,
    told: Callable[[FormChoice], None] = lambda _: None,
    image: Image | None = None,
) -> CausalLM:
    """Load this rank's share of the model at `path`: a folder with weights and `config.json`, or a GGUF file.

    `dtype` None chooses by `resolve_dtype`, `backend` None by device and element type. `max_threads` limits torch's
    threads from here on. `prepared` hands out what an earlier start packed, or remembers it for `prepared.save()`;
    its reading is over when this returns or raises. `weights` says whether matrices take 12 bits a weight, bit for bit;
    `rows`, which products have, decide under `Auto`; `told` hears what was decided.
    `image` has tensors of it on the device; what of it is not taken is given back.
    Raises StartupError with a reason and a sentence for everything
    that a person must fix, ValueError for a `backend` that does not compute in `dtype`.
    """
    try:
        return _load(path, device, dtype, context, backend, max_threads, prepared, weights, rows, told, image)
    finally:
        if image is not None:
            image.close()
        if prepared is not None:
            prepared.finish()


def _load(
    path: Path,
    device: torch.device,
    dtype: torch.dtype | None,
    context: ParallelContext,
    backend: BackendName | None,
    max_threads: int | None,
    prepared: PreparedWeights | None,
    weights: WeightsForm,
    rows: Rows,
    told: Callable[[FormChoice], None],
    image: Image | None,
) -> CausalLM:
    if max_threads is not None:
        torch.set_num_threads(max_threads)
    config, source = open_checkpoint(path)
    family, prefix = find_family(config.architecture), find_prefix(source)
    chosen = dtype or resolve_dtype(device, config.dtype)
    parts = find_backend(backend or select_backend(device, chosen))
    if parts.dtype not in {None, chosen}:
        raise ValueError(f"the {parts.name} backend computes in {parts.dtype}, not in {chosen}")
    with torch.inference_mode(), _open_uploads(device, image) as uploads:
        config = settle_output_matrix(config, source, prefix)
        taken = check_coverage(config, family, source, prefix)
        asks = weights == "Auto" and parts.lossless is not None
        choice = choose_weights(parts, chosen, weights, rows, count_matrix_bytes(source, taken) if asks else None)
        told(choice)
        lossless = parts.lossless if choice.form == "lossless" else None
        make_packer = parts.packer if lossless is None else lossless.packer
        if prepared is not None and make_packer is not None:
            prepared.settle(choice.form)
        loader = WeightLoader(
            source,
            dtype=chosen,
            device=device,
            keeps_packed=parts.keeps_packed,
            prefix=prefix,
            packer=None if make_packer is None else make_packer(),
            shrink=None if lossless is None else lossless.shrink,
            prepared=prepared,
            uploads=uploads,
            image=image,
        )
        model = family.load(config, Build(loader=loader, backend=parts, context=context))
    if lossless is not None and lossless.connect is not None:
        lossless.connect(model)
    _log_backend(parts.name, chosen)
    if choice.form == "lossless":
        kept = loader.lossless
        bits = round(8 * kept.num_bytes / max(kept.weights, 1), 3)
        logger.info(
            "matrices are kept in 12 bits",
            extra={"matrices": kept.matrices, "bits_per_weight": bits, "why": choice.why},
        )
    else:
        logger.info("matrices are kept plain", extra={"why": choice.why})
    if loader.forms:
        logger.info("quantized weights", extra={"matrices": dict(loader.forms)})
    return model


def _open_uploads(device: torch.device, image: Image | None) -> AbstractContextManager[Uploads | None]:
    if device.type != "cuda" or image is not None:
        return nullcontext()
    from tandem_worker.host.cuda import CudaError
    from tandem_worker.model.checkpoint.upload import open_uploads

    try:
        return open_uploads(device)
    except CudaError as error:
        logger.warning("weights are copied one after another: %s", error)
        return nullcontext()


def count_matrix_bytes(source: WeightSource, names: Iterable[str]) -> int:
    """Bytes of the matrices among those tensors in bfloat16, whatever the checkpoint has them in."""
    shapes = map(source.shape, names)
    return 2 * sum(math.prod(shape) for shape in shapes if len(shape) > 1)


def choose_weights(
    backend: Backend, dtype: torch.dtype, weights: WeightsForm, rows: Rows = ANY_ROWS, matrix_bytes: int | None = None
) -> FormChoice:
    """Which form a model's matrices get for products of so many rows, and why. `matrix_bytes` None: more than caches
    hold.

    Raises StartupError where `Lossless` is asked for and cannot be had.
    """
    lossless = backend.lossless
    if lossless is None:
        obstacle = "Only the kernels for GPUs and those for CPUs multiply them, and torch's operations are in use."
        return choose_form(weights, rows, obstacle, {})
    footprint = None if matrix_bytes is None else Footprint(matrix_bytes, lossless.count_cache_bytes())
    return choose_form(weights, rows, lossless.find_obstacle(dtype), lossless.ratios, footprint)


def _log_backend(name: BackendName, dtype: torch.dtype) -> None:
    # Elsewhere nobody asks: where there is no obstacle, looking for one loads the kernels and starts their threads.
    why = native.find_obstacle() if name is BackendName.TORCH and dtype == torch.bfloat16 else None
    logger.info("layers are made of the %s backend", name, extra={} if why is None else {"why": why})


def find_prefix(source: WeightSource) -> str:
    """What stands before `model.` in the tensor names: multimodal checkpoints put their language model's name there."""
    for name in source.names():
        if name.endswith(EMBEDDING) and (name == EMBEDDING or name.startswith(_LANGUAGE_MODEL)):
            return name.removesuffix(EMBEDDING)
    return ""


def resolve_dtype(device: torch.device, checkpoint: torch.dtype) -> torch.dtype:
    """Element type under `dtype: Auto`: the checkpoint's on a GPU; bfloat16 on a CPU that multiplies it in hardware."""
    if device.type == "cpu":
        return torch.bfloat16 if _cpu_multiplies_bfloat16() else torch.float32
    return checkpoint


def _cpu_multiplies_bfloat16() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "amx_tile", "bf16"))


def open_checkpoint(path: Path) -> tuple[ModelConfig, WeightSource]:
    """Configuration and weights at `path`, nothing read into memory yet."""
    if not path.exists():
        raise StartupError("WeightsNotFound", f"There is no model at {path}.")
    gguf = find_gguf(path)
    if gguf is not None:
        return _open_gguf(gguf)
    files = find_safetensors(path) if path.is_dir() else []
    if not files:
        raise StartupError(
            "WeightsNotFound", f"{path} holds no weights: neither *.safetensors nor a *.gguf file was found."
        )
    raw = read_raw_config(path / CONFIG_FILE)
    architecture = read_architecture(raw)
    config = parse_config(raw, find_family(architecture).keys, architecture=architecture)
    config = replace(config, embedding=read_embedding_spec(path, config.hidden_size))
    if config.embedding is None and config.architecture.endswith("Model"):
        raise StartupError(
            "UnsupportedArchitecture",
            f"{config.architecture} has no output matrix, so it cannot generate text, and no {MODULES} says how it "
            "makes embeddings.",
        )
    source = dequantize_source(_open_safetensors(path, files), config.quantization)
    return config, BareSource(source) if _BARE_EMBEDDING in source else source


def _open_safetensors(folder: Path, files: list[Path]) -> WeightSource:
    if not is_packed(folder):
        return SafetensorsSource(files)
    from tandem_worker.model.checkpoint.lossless import LosslessSource  # brings zstd, which others do not need

    return LosslessSource(folder, files)


def _open_gguf(path: Path) -> tuple[ModelConfig, WeightSource]:
    reader = open_gguf(path)
    metadata = gguf_metadata(reader)
    source = GGUFSource(path, reader, metadata)
    architecture = gguf_architecture(metadata)
    raw = translate_metadata(metadata, source)
    return parse_config(raw, find_family(architecture).keys, architecture=architecture, where=path.name), source
