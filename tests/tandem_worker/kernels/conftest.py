"""Compiling kernels for Hopper without a GPU: what the launchers would launch is recorded, then compiled."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

_TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8e4nv",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip
_LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What the compiler made of one launch."""

    name: str
    ptx: str
    shared: int
    registers: int
    stack: int
    """Bytes of local memory per thread: spilled registers and arrays with run-time indices."""
    options: dict[str, Any]
    """Tile shapes and the like, as launched."""
    cubin: bytes

    def loops(self) -> list[Counter[str]]:
        """How often each instruction is in the loops that have no other within, in their order."""
        return find_loops(_run_tool("nvdisasm", "-c", cubin=self.cubin))


def compile_for_hopper(kernel: JITFunction, args: tuple, options: dict) -> Compiled:
    """Specialize on dtypes, divisibility by 16 and ones as a launch on a GPU does, and compile to machine code."""
    named = {name: value for name, value in options.items() if name in kernel.arg_names}
    bound = dict(zip(kernel.arg_names, args, strict=False)) | named
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = bound[parameter.name]
        specialized = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1 and specialized):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + _TYPES[value.dtype]
        elif isinstance(value, int):
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
        else:
            signature[parameter.name] = "fp32"
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0 and specialized):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    launch = {name: options[name] for name in _LAUNCH_OPTIONS if name in options}
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch)
    registers, stack = _resources(binary.asm["cubin"])
    return Compiled(
        name=kernel.__name__, ptx=binary.asm["ptx"], shared=binary.metadata.shared, registers=registers, stack=stack,
        options=options, cubin=binary.asm["cubin"],
    )  # fmt: skip


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes per thread, read from the machine code."""
    report = _run_tool("cuobjdump", "-res-usage", cubin=cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert found, report
    return int(found[1]), int(found[2])


def _run_tool(name: str, option: str, *, cubin: bytes) -> str:
    """What one of the assembler's tools, which Triton brings, says about machine code."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout


_LABEL = re.compile(r"^(\.L_x_\d+):")
_BRANCH = re.compile(r"\bBRA\b.*\((\.L_x_\d+)\)")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]+)")


def find_loops(code: str) -> list[Counter[str]]:
    """Instructions of the innermost loops in `nvdisasm`'s text: from a label to a branch back to it."""
    lines, labels, spans = code.splitlines(), {}, []
    for number, line in enumerate(lines):
        if label := _LABEL.match(line):
            labels[label[1]] = number
        branch = _BRANCH.search(line)
        if branch and branch[1] in labels:
            spans.append((labels[branch[1]], number))
    inner = [span for span in spans if not any(span[0] <= a and b <= span[1] and (a, b) != span for a, b in spans)]
    return [Counter(found[1] for line in lines[a : b + 1] if (found := _INSTRUCTION.match(line))) for a, b in inner]


@pytest.fixture
def compiled_launches(monkeypatch):
    """Call an operation with CPU tensors; returns what each kernel it launches compiles to."""
    from tandem_worker.kernels import dispatch, split_merge

    launches: list[tuple[JITFunction, tuple, dict]] = []

    def record(kernel, *args, grid, warmup, **options):
        launches.append((kernel, args, options))

    monkeypatch.setattr(JITFunction, "run", record)
    monkeypatch.setattr(dispatch, "runs_on_triton", lambda tensor: True)
    monkeypatch.setattr(split_merge, "_INTERPRETED_SMS", 132)

    def compile_call(call) -> list[Compiled]:
        launches.clear()
        call()
        return [compile_for_hopper(*launch) for launch in launches]

    return compile_call
