"""The stages, in their order: nothing after a stage that fails is worth as much as finding out why."""

from __future__ import annotations

from bench.gpu.item import Phase, Stage

GPU_TESTS = (
    "tests/tandem_worker/kernels/on_device/test_moe.py",
    "tests/tandem_worker/model/test_served_steps.py",
    "tests/tandem_worker/model/backends/test_backends.py",
    "tests/tandem_worker/kernels/on_device/test_paged_attention.py",
    "tests/tandem_worker/kernels/on_device/test_checked_rows.py",
    "tests/tandem_worker/kernels/on_device/test_linear.py",
    "tests/tandem_worker/kernels/on_device/test_split_byte.py",
    "tests/tandem_worker/kernels/on_device/test_mla.py",
    "tests/tandem_worker/engine/execute/test_cuda_graphs.py",
    "tests/tandem_worker/engine/execute/test_host_pool.py",
    "tests/tandem_worker/kernels/on_device/test_sampling.py",
    "tests/tandem_worker/kernels/on_device/test_elementwise.py",
    "tests/tandem_worker/kernels/on_device/test_fused_qkv.py",
    "tests/tandem_worker/model/checkpoint/test_upload.py",
    "tests/tandem_worker/tiers/test_memory.py",
    "tests/tandem_worker/transfer/test_device_blocks.py",
    "tests/tandem_worker/model/checkpoint/test_image.py",
)
"""Every file with tests that need a GPU, those first whose kernels take longest to compile."""
CHECKS = (
    "experts int4", "experts mxfp4", "experts lossless", "experts fp8", "experts bf16", "products int4",
    "products mxfp4", "products lossless", "products fp8", "products bf16", "prefill", "decode", "sampling",
    "elementwise",
)  # fmt: skip
"""Themes whose cases are checked side by side: most of the time Triton compiles, on a core of its own for each."""

STAGES = {
    stage.name: stage
    for stage in (
        Stage(
            name="correctness",
            what="the machine, its ceilings, the GPU tests",
            seconds=440,
            phases=(
                Phase(lanes=("correctness:machine_items",), seconds=90),
                Phase(lanes=tuple(f"correctness:test_items {path}" for path in GPU_TESTS), seconds=270, together=12),
                Phase(lanes=("correctness:blocking_items",), seconds=120),
            ),
        ),
        Stage(
            name="shapes",
            what="every bench case at served sizes: right, the same bits twice, then its time",
            seconds=475,
            phases=(
                Phase(lanes=tuple(f"shapes:check_items {theme}" for theme in CHECKS), seconds=240, together=12),
                Phase(lanes=("shapes:time_items",), seconds=300),
            ),
        ),
        Stage(
            name="engine",
            what="an 8B model with random weights through the engine",
            seconds=475,
            phases=(
                Phase(lanes=("engine:engine_items",), seconds=390),
                Phase(lanes=("engine:baseline_items",), seconds=90),
            ),
        ),
        Stage(
            name="start",
            what="worker processes from exec to their first token, 16 GB of weights in the page cache",
            seconds=200,
            phases=(Phase(lanes=("start:start_items",), seconds=200),),
        ),
        Stage(
            name="lossless",
            what="weights of 12 bits against plain ones: products, then an 8B model",
            seconds=475,
            phases=(
                Phase(lanes=("lossless:product_items",), seconds=240),
                Phase(lanes=("lossless:model_items",), seconds=235),
            ),
        ),
        Stage(
            name="variants",
            what="other splits, warps and stages of the kernels that matter most",
            seconds=475,
            phases=(Phase(lanes=("variants:variant_items",), seconds=475),),
        ),
        Stage(
            name="tools",
            what="memory and race checkers at small shapes, hardware counters",
            seconds=475,
            phases=(Phase(lanes=("tools:tool_items",), seconds=475),),
        ),
    )
}
