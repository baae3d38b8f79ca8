"""Arithmetic with two fp16 numbers in a word, inside a Triton kernel.

A thread of a GPU computes with both halves of a register at once. Compilers do not find that by themselves
where numbers come out of packed codes, so for CUDA the instructions are named. Elsewhere (another GPU,
Triton's interpreter) the same is computed half by half.
"""

import os

import triton
import triton.language as tl
from triton.language.target_info import current_target

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.constexpr_function
def named() -> bool:
    """Whether instructions are named."""
    target = None if INTERPRETED else current_target()
    return target is not None and target.backend == "cuda"


@triton.constexpr_function
def twice(half: int) -> int:
    """A word, int32, with these 16 bits in both halves."""
    word = half * 0x10001
    return word - (1 << 32) if word >> 31 else word


@triton.constexpr_function
def bits_of(number: float) -> int:
    """The 16 bits of a number that fp16 has, and that is no smaller than its normal ones."""
    size, exponent = abs(number), 15
    while size >= 2:
        size, exponent = size / 2, exponent + 1
    while size < 1:
        size, exponent = size * 2, exponent - 1
    mantissa = int((size - 1) * 1024)
    assert size == 1 + mantissa / 1024 and 0 < exponent < 31
    return (0x8000 if number < 0 else 0) | exponent << 10 | mantissa


@triton.constexpr_function
def instruction(name: str, operands: int) -> str:
    return f"{name} {', '.join(f'${i}' for i in range(operands + 1))};"


@triton.constexpr_function
def constraints(operands: int) -> str:
    return ",".join(["=r"] + ["r"] * operands)


@triton.constexpr_function
def select_bits(mask: int, bits: int) -> str:
    """a & b | c"""
    return f"lop3.b32 $0, $1, {mask & 0xFFFFFFFF:#x}, {bits & 0xFFFFFFFF:#x}, 0xEA;"


@triton.jit
def constant(number: tl.constexpr):
    """A word with a number in both halves, of one element."""
    return tl.full([1], twice(bits_of(number)), tl.int32)


@triton.jit
def halves_of(word):
    """Both fp16 numbers of each word, the lower first."""
    if named():
        return tl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [word], (tl.float16, tl.float16), True, 1
        )
    else:
        low = word.to(tl.int16).to(tl.float16, bitcast=True)
        return low, (word >> 16).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def word_of(low, high):
    """A word of two fp16 numbers."""
    low, high = low.to(tl.int16, bitcast=True), high.to(tl.int16, bitcast=True)
    return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)


@triton.jit
def word_of_numbers(low, high):
    """A word of two int32 numbers of 16 bits."""
    return (low & 0xFFFF) | (high << 16)


@triton.jit
def masked_or(word, MASK: tl.constexpr, BITS: tl.constexpr):
    """``word & MASK | BITS``, of a MASK and BITS for both halves."""
    if named():
        asm: tl.constexpr = select_bits(twice(MASK), twice(BITS))
        return tl.inline_asm_elementwise(asm, "=r,r", [word], tl.int32, True, 1)
    else:
        return word & twice(MASK) | twice(BITS)


@triton.jit
def multiply(a, b):
    """``a b`` of both halves."""
    if named():
        asm: tl.constexpr = instruction("mul.rn.f16x2", 2)
        return tl.inline_asm_elementwise(asm, constraints(2), [a, b], tl.int32, True, 1)
    else:
        a, b = tl.broadcast(a, b)
        a0, a1 = halves_of(a)
        b0, b1 = halves_of(b)
        return word_of(a0 * b0, a1 * b1)


@triton.jit
def fused(a, b, c):
    """``a b + c`` in fp16, rounded once but for what fp32 rounds."""
    return (a.to(tl.float32) * b.to(tl.float32) + c.to(tl.float32)).to(tl.float16)


@triton.jit
def multiply_add(a, b, c):
    """``a b + c`` of both halves."""
    if named():
        asm: tl.constexpr = instruction("fma.rn.f16x2", 3)
        return tl.inline_asm_elementwise(asm, constraints(3), [a, b, c], tl.int32, True, 1)
    else:
        a, b = tl.broadcast(a, b)
        a, c = tl.broadcast(a, c)
        b, c = tl.broadcast(b, c)
        a0, a1 = halves_of(a)
        b0, b1 = halves_of(b)
        c0, c1 = halves_of(c)
        return word_of(fused(a0, b0, c0), fused(a1, b1, c1))


@triton.jit
def add(a, b):
    """``a + b`` of both halves."""
    if named():
        asm: tl.constexpr = instruction("add.rn.f16x2", 2)
        return tl.inline_asm_elementwise(asm, constraints(2), [a, b], tl.int32, True, 1)
    else:
        a, b = tl.broadcast(a, b)
        a0, a1 = halves_of(a)
        b0, b1 = halves_of(b)
        return word_of(a0 + b0, a1 + b1)


@triton.jit
def equal(a, b):
    """1 in each half where ``a`` and ``b`` have the same number below 31744, 0 where not: those are the bits
    of finite fp16 numbers."""
    if named():
        asm: tl.constexpr = instruction("set.eq.f16x2.f16x2", 2)
        return tl.inline_asm_elementwise(asm, constraints(2), [a, b], tl.int32, True, 1)
    else:
        other = a ^ b
        low, high = (other & 0xFFFF == 0).to(tl.int32), (other & -65536 == 0).to(tl.int32)
        return (low | high << 16) * bits_of(1.0)


@triton.jit
def negative(a):
    """``-a`` of both halves."""
    if named():
        asm: tl.constexpr = instruction("neg.f16x2", 1)
        return tl.inline_asm_elementwise(asm, constraints(1), [a], tl.int32, True, 1)
    else:
        return a ^ twice(0x8000)


@triton.jit
def lower(a, b):
    """A word of the lower halves of two words."""
    if named():
        asm: tl.constexpr = "prmt.b32 $0, $1, $2, 0x5410;"
        return tl.inline_asm_elementwise(asm, constraints(2), [a, b], tl.int32, True, 1)
    else:
        return (a & 0xFFFF) | (b << 16)


@triton.jit
def higher(a, b):
    """A word of the higher halves of two words."""
    if named():
        asm: tl.constexpr = "prmt.b32 $0, $1, $2, 0x7632;"
        return tl.inline_asm_elementwise(asm, constraints(2), [a, b], tl.int32, True, 1)
    else:
        return ((a >> 16) & 0xFFFF) | (b & -65536)


@triton.jit
def as_halves(word, M: tl.constexpr, K: tl.constexpr):
    """Words ``[M, K / 2]`` as fp16 ``[M, K]``."""
    low, high = halves_of(word)
    return tl.reshape(tl.join(low, high), (M, K))


@triton.jit
def as_words(x, M: tl.constexpr, K: tl.constexpr):
    """fp16 ``[M, K]`` as words ``[M, K / 2]``."""
    low, high = tl.split(tl.reshape(x, (M, K // 2, 2)))
    return word_of(low, high)
