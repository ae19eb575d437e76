"""How long a worker's steps take: a linear table per model and GPU, with the source of its figures.

Prefill of n uncached tokens after c cached ones is bound by arithmetic: `prefill_token_seconds` per token, and
`prefill_pair_seconds` per query and key for attention, of which there are n * c + n * n / 2. A decode step of b
sequences with T tokens of context is bound by memory: `step_seconds` to read the weights, `step_context_seconds` for
every token of context, and `step_sequence_seconds` for every sequence. This is the roofline model (Williams, Waterman
and Patterson 2009) with an efficiency for each of the two bounds.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """What a GPU reaches."""

    name: str
    flops: float
    """Dense bfloat16 operations per second."""
    bandwidth: float
    """Bytes per second of its memory."""
    memory: float
    """Bytes."""
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What a model costs per token."""

    name: str
    parameters: float
    """Read in every step, without the input embedding."""
    bytes_per_parameter: float
    layers: int
    query_heads: int
    kv_heads: int
    head_size: int
    source: str

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values of one token, in bfloat16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_size


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProfile:
    """One replica of one role."""

    name: str
    source: str
    gpus: int = 1
    prefill_seconds: float = 0.0
    """Taken by every prompt, however short."""
    prefill_token_seconds: float
    prefill_pair_seconds: float = 0.0
    step_seconds: float
    step_sequence_seconds: float = 0.0
    step_context_seconds: float = 0.0
    kv_tokens: int
    """Tokens whose keys and values fit into it."""
    kv_bytes: int = 0
    """Size of one token."""
    link_bytes_per_second: float = float("inf")
    """Rate of the connection over which it sends or receives keys and values."""
    first_token_seconds: float = 0.0
    """From the end of computing a prompt to its first token, beside the link's time: nobody is busy with it."""
    chunk_tokens: int = 2048
    """Tokens in one step, where a worker computes prompts beside decodes."""
    chunk_overhead_tokens: float = 0.0
    """A chunk beside decodes takes as long as so many prompt tokens more."""

    def prefill(self, uncached: int, cached: int) -> float:
        """Seconds that a prompt takes alone."""
        pairs = uncached * (cached + uncached / 2)
        return self.prefill_seconds + uncached * self.prefill_token_seconds + pairs * self.prefill_pair_seconds

    def step(self, sequences: float, context: float) -> float:
        """Seconds of a decode step of so many sequences with so many tokens of context together."""
        return self.step_seconds + sequences * self.step_sequence_seconds + context * self.step_context_seconds

    def mixed_step(self, sequences: float, context: float, chunk: float, before: float) -> float:
        """Seconds of a step that also computes `chunk` tokens of a prompt of which `before` are there already.

        Weights are read once for both: of reading them and of the chunk's arithmetic the longer counts. Attention to
        the sequences' context and to what is there of the prompt comes on top; that within the chunk is left to the
        caller, for whom `before` grows.
        """
        linear = max(self.step_seconds, (chunk + self.chunk_overhead_tokens) * self.prefill_token_seconds)
        own = self.step(sequences, context) - self.step_seconds
        return linear + own + chunk * before * self.prefill_pair_seconds

    def transfer(self, tokens: int) -> float:
        """Seconds that the link is busy with the blocks of a prompt."""
        return tokens * self.kv_bytes / self.link_bytes_per_second


PREFILL_EFFICIENCY = 0.5
"""Share of the matrix rate. Assumed, not measured: what serving engines are commonly reported to reach on long
prompts."""
DECODE_EFFICIENCY = 0.65
"""Share of the memory's rate: SGLang decodes Qwen3-8B on an H200 at 187 tokens/s, where reading the weights allows
286."""
CHUNK_OVERHEAD_TOKENS = 128.0
"""Assumed, neither measured nor from a source: chunks of 512 tokens then take a quarter longer than their share of a
whole prompt, and chunks of 2,048 hardly any longer.
"""
MEMORY_SHARE = 0.9
LINK = 25e9
"""Bytes per second: half of a 400 Gbit/s network card."""

H200 = Gpu(
    name="H200", flops=790e12, bandwidth=4.3e12, memory=139 * 2**30,
    source="measured on one: 8192-cubed bfloat16 matmul, copy within the device",
)  # fmt: skip
H100 = Gpu(
    name="H100", flops=0.8 * 989e12, bandwidth=0.9 * 3.35e12, memory=80e9,
    source="NVIDIA's data sheet of the SXM5 board: 989 TFLOP/s, 3.35 TB/s; 80% and 90% of it, as an H200 reaches",
)  # fmt: skip
A100 = Gpu(
    name="A100", flops=0.8 * 312e12, bandwidth=0.9 * 2.039e12, memory=80e9,
    source="NVIDIA's data sheet of the 80 GB SXM4 board: 312 TFLOP/s, 2.039 TB/s; 80% and 90% of it",
)  # fmt: skip
QWEN3_8B = Model(
    name="Qwen3-8B", parameters=7.6e9, bytes_per_parameter=2, layers=36, query_heads=32, kv_heads=8, head_size=128,
    source="the model's config.json",
)  # fmt: skip
QWEN3_32B_FP8 = Model(
    name="Qwen3-32B-FP8", parameters=32e9, bytes_per_parameter=1, layers=64, query_heads=64, kv_heads=8, head_size=128,
    source="the model's config.json; weights in 8 bits, arithmetic in 16",
)  # fmt: skip

GPUS = {gpu.name: gpu for gpu in (H200, H100, A100)}
MODELS = {model.name: model for model in (QWEN3_8B, QWEN3_32B_FP8)}


def build_profile(model: Model, gpu: Gpu) -> WorkerProfile:
    """The roofline of a model on one GPU."""
    flops = gpu.flops * PREFILL_EFFICIENCY
    bandwidth = gpu.bandwidth * DECODE_EFFICIENCY
    weights = model.parameters * model.bytes_per_parameter
    room = MEMORY_SHARE * gpu.memory - weights
    if room <= 0:
        raise ValueError(f"{model.name} takes {weights / 1e9:.0f} GB and does not fit into one {gpu.name}")
    return WorkerProfile(
        name=f"{model.name} on {gpu.name}",
        source=f"roofline; {gpu.name}: {gpu.source}; {model.name}: {model.source}",
        prefill_seconds=0.01,
        prefill_token_seconds=2 * model.parameters / flops,
        prefill_pair_seconds=4 * model.layers * model.query_heads * model.head_size / flops,
        step_seconds=weights / bandwidth,
        step_sequence_seconds=2 * model.parameters / flops,
        step_context_seconds=model.kv_bytes / bandwidth,
        kv_tokens=int(room / model.kv_bytes),
        kv_bytes=model.kv_bytes,
        chunk_overhead_tokens=CHUNK_OVERHEAD_TOKENS,
        link_bytes_per_second=LINK,
    )
