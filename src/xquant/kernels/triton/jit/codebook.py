"""Levels of a codebook, inside a Triton kernel: fp16 numbers two in a word, looked up four at a time.

A thread of an NVIDIA GPU looks four bytes up in a table of eight by one instruction (``prmt``). So a table of
up to 16 levels stays in registers, its lower bytes and its higher ones apart. Elsewhere levels are loaded.
"""

import triton
import triton.language as tl

from .codes import BYTES, LEVEL, QUARTER, unpacked
from .halves import constant, constraints, multiply, named, word_of

ADDED_NOTHING = tl.constexpr(
    # x x + x is even
    "{ .reg .b32 x; mov.u32 x, %laneid; mad.lo.u32 x, x, x, x; and.b32 x, x, 1; or.b32 $0, $1, x; }"
)
IN_REGISTERS = tl.constexpr(4)  # bits of codes whose table is kept there


@triton.constexpr_function
def chosen_from(bits: int) -> str:
    """Of codes ``a0 a1 b0 b1``, the bytes of $2, the levels of ``a0 b0`` and of ``a1 b1``. The table is in $3
    to $6 (lower bytes), and in $7 to $10; of less than four bits in the first two of either."""
    by_byte = "\n".join(
        f"prmt.b32 {to}, ${at}, ${at + 1}, number;\n"
        + (
            f"prmt.b32 upper, ${at + 2}, ${at + 3}, number;\nprmt.b32 {to}, {to}, upper, choice;"
            if bits == 4
            else ""
        )
        for to, at in (("low", 3), ("high", 7))
    )
    return f"""{{
        .reg .b32 number, choice, low, high, upper;
        shr.u32 number, $2, 12;
        or.b32 number, number, $2;
        shr.u32 choice, number, 1;
        lop3.b32 choice, choice, 0x4444, 0x3210, 0xEA;
        and.b32 number, number, 0x7777;
        {by_byte}
        prmt.b32 $0, low, high, 0x5140;
        prmt.b32 $1, low, high, 0x7362;
    }}"""


@triton.jit
def of_thread(word):
    """A word that is the same in all threads, so that the assembler does not know it. It would keep it in
    uniform registers, which ``prmt`` does not take, and move it for every look-up."""
    asm: tl.constexpr = ADDED_NOTHING
    return tl.inline_asm_elementwise(asm, "=r,r", [word], tl.int32, True, 1)


@triton.jit
def bytes_of_four(codebook, at, COUNT: tl.constexpr):
    """The lower bytes of a quarter of four of ``COUNT`` levels from number ``at`` on, and the higher ones.

    They are tensors of one element: Triton 3.6 makes a tile in the layout that a product takes only of
    constants and of loads of tensors.
    """
    one = tl.arange(0, 1)
    low, high = tl.zeros([1], tl.int32), tl.zeros([1], tl.int32)
    for i in tl.static_range(4):
        level = tl.load(codebook + (at + i) % COUNT + one) * QUARTER
        bits = level.to(tl.int16, bitcast=True).to(tl.int32)
        low |= (bits & 0xFF) << (8 * i)
        high |= ((bits >> 8) & 0xFF) << (8 * i)
    return of_thread(low), of_thread(high)


@triton.jit
def table_of(codebook, LAYOUT: tl.constexpr):
    """What `levels_of` looks up in: ``codebook`` fp16 ``[2**bits]``, or what registers have of it."""
    if named() and LAYOUT.codebook and LAYOUT.bits <= IN_REGISTERS:
        count: tl.constexpr = 1 << LAYOUT.bits
        low0, high0 = bytes_of_four(codebook, 0, count)
        low1, high1 = bytes_of_four(codebook, 4, count)
        low2, high2 = bytes_of_four(codebook, 8, count)
        low3, high3 = bytes_of_four(codebook, 12, count)
        return low0, low1, low2, low3, high0, high1, high2, high3
    else:
        return codebook


@triton.jit
def level_at(codebook, codes, BYTE: tl.constexpr):
    return tl.load(codebook + ((codes >> (8 * BYTE)) & 0xFF))


@triton.jit
def looked_up(codes, table, BITS: tl.constexpr):
    """A quarter of the levels of codes `BYTES`: words of those of bytes 0 and 2, and of bytes 1 and 3."""
    if named() and BITS <= IN_REGISTERS:
        low0, low1, low2, low3, high0, high1, high2, high3 = table
        asm: tl.constexpr = chosen_from(BITS)
        results: tl.constexpr = "=r," + constraints(9)
        given = [codes, low0, low1, low2, low3, high0, high1, high2, high3]
        return tl.inline_asm_elementwise(asm, results, given, (tl.int32, tl.int32), True, 1)
    else:
        even = word_of(level_at(table, codes, 0), level_at(table, codes, 2))
        odd = word_of(level_at(table, codes, 1), level_at(table, codes, 3))
        return multiply(even, constant(QUARTER)), multiply(odd, constant(QUARTER))


@triton.jit
def levels_of(words, table, LAYOUT: tl.constexpr):
    """A quarter of the level of each code, exactly, as `unpacked`; of a codebook whose ``table`` is that of
    `table_of`."""
    if LAYOUT.codebook:
        codes = unpacked(words, LAYOUT.bits, BYTES)
        even, odd = looked_up(codes, table, LAYOUT.bits)
        both = tl.permute(tl.join(even, odd), (0, 2, 1))
        return tl.reshape(both, (codes.shape[0], 2 * codes.shape[1]))
    else:
        return unpacked(words, LAYOUT.bits, LEVEL)
