"""Kernels for CPUs that multiply bfloat16 in AVX-512 registers (Zen 4, Cooper Lake, Sapphire Rapids and later).

`*.cpp` become `libtandem_cpu.so` by the Makefile beside them; `library.py` calls it. Where it cannot serve,
`find_obstacle` says why, and layers are made of torch's operations instead.
"""

from tandem_worker.model.backends.native.library import COLUMNS as COLUMNS
from tandem_worker.model.backends.native.library import LANES as LANES
from tandem_worker.model.backends.native.library import AttentionStep as AttentionStep
from tandem_worker.model.backends.native.library import find_lossless_obstacle as find_lossless_obstacle
from tandem_worker.model.backends.native.library import find_obstacle as find_obstacle
from tandem_worker.model.backends.native.library import gate_up_silu as gate_up_silu
from tandem_worker.model.backends.native.library import linear as linear
from tandem_worker.model.backends.native.library import packed_address as packed_address
from tandem_worker.model.backends.native.library import place_heads as place_heads
from tandem_worker.model.backends.native.library import rms_norm as rms_norm
from tandem_worker.model.backends.native.library import silu_mul as silu_mul
from tandem_worker.model.backends.native.library import use_threads as use_threads
