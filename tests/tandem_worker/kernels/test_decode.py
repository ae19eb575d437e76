"""The assembly that decodes weights of 12 bits, carried out word by word as PTX defines its five instructions.

Nothing else runs it without a GPU: the interpreter takes another form.
"""

from __future__ import annotations

import re

import numpy as np
import torch
from tandem_worker.kernels import split_byte
from tandem_worker.kernels.split_tiles import DECODE

WORD = 0xFFFFFFFF


def permute(low: int, high: int, selector: int) -> int:
    """`prmt.b32` in its default mode: four of eight bytes; bit 3 of a nibble would spread a sign instead."""
    source = (low | high << 32).to_bytes(8, "little")
    nibbles = [selector >> 4 * place & 15 for place in range(4)]
    chosen = [0xFF * (source[n & 7] >> 7) if n & 8 else source[n] for n in nibbles]
    return int.from_bytes(bytes(chosen), "little")


def look_up(a: int, b: int, c: int, table: int) -> int:
    """`lop3.b32`: each bit by the table's, of three bits the first the highest."""
    return sum((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i for i in range(32))


OPERATIONS = {
    "and.b32": lambda a, b: a & b,
    "shr.b32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b & WORD,
    "prmt.b32": permute,
    "lop3.b32": look_up,
}


def run(text: str, operands: dict[str, int]) -> dict[str, int]:
    """Registers after the instructions of `text`."""
    registers = dict(operands)
    for instruction in re.sub(r"\{ *\.reg[^;]*;|\}", "", text).split(";"):
        if instruction.strip():
            name, rest = instruction.split(maxsplit=1)
            target, *sources = (word.strip() for word in rest.split(","))
            values = [registers[word] if word in registers else int(word, 0) for word in sources]
            registers[target] = OPERATIONS[name](*values)
    return registers


def test_the_instructions_give_what_was_encoded() -> None:
    generator = torch.Generator().manual_seed(11)
    values = (torch.randn(3, 256, generator=generator) * 0.02).bfloat16()
    values[torch.rand(values.shape, generator=generator) < 0.1] = 0.0
    values[0, ::7] = -0.0
    parts = split_byte.encode(values)
    assert parts is not None
    low, codes, beside = (part.numpy() for part in parts)
    table = beside[:2].view(np.uint32)
    words, pairs = codes.view("<u4"), low.view("<u4").reshape(3, -1, 2)
    expected = values.view(torch.int16).numpy().view(np.uint16).reshape(3, -1, 2, 32)
    escaped = {(int(word) >> 24 & 255, int(word) & 0xFFFFFF) for word in beside[int(beside[2]) :: 2]}
    compared = 0
    for row, word in np.ndindex(*words.shape):
        inputs = {"$4": pairs[row, word, 0], "$5": pairs[row, word, 1], "$6": words[row, word]}
        inputs |= {"$7": table[0], "$11": table[1]}
        found = run(DECODE.value, {name: int(value) for name, value in inputs.items()})
        unit, first = divmod(4 * word, 32)
        for side, names in ((0, ("$0", "$1")), (1, ("$2", "$3"))):
            made = np.array([found[name] for name in names], "<u4").view(np.uint16)
            for place, bits in enumerate(made):
                column = 64 * unit + 32 * side + first + place
                if (row, column) not in escaped:
                    assert bits == expected[row, unit, side, first + place], (row, column)
                    compared += 1
    assert compared > 700


def test_it_takes_eleven_instructions_for_eight_weights() -> None:
    assert len(re.findall(r"\b(?:and|prmt|lop3|shr|shl)\.b32", DECODE.value)) == 11


def test_the_instructions_are_carried_out_as_ptx_says() -> None:
    assert permute(0x03020100, 0x07060504, 0x7531) == 0x07050301
    assert permute(0x80, 0, 0x8888) == WORD
    assert look_up(0b1100, 0b1010, 0b0110, 0xF8) == 0b1100 | (0b1010 & 0b0110)
