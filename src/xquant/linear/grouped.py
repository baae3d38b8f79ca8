"""Weights of 4 or 8 bits in groups of 32 channels, the formats Q4_1 and Q8_0 of GGUF files.

A weight is ``code * scale + zero``. Of 4 bits, a group's lowest and highest number are codes 0 and 15; of 8,
codes are those of numbers from minus to plus the group's largest magnitude, and ``zero`` is -128 times the
scale. Scales and zeros are fp16: 5.0 and 8.5 bits a number. Numbers that were such codes once are found
exactly: whoever packs what was read from a file of that format has the file's own codes again.

The packed weight is ``[ceil(N / 16), C / 32, bytes]``: of 16 outputs and 32 channels the codes, then the 16
scales, then, of 4 bits, the 16 zeros. Codes of an output are the 32-bit lanes of a few vectors: lane ``v``
has ``2p`` channels (``p`` = 16 / bits), of which ``2i`` is in the lower half from bit ``i * bits`` on, and
``2i + 1`` in the upper half. The native library (csrc/linear.h) multiplies rows, rounded to 15 bits, with
the codes.
"""

from collections.abc import Callable, Sequence
from functools import cache
from threading import local
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels.cpu import library as native
from ..operators import operator
from .layer import PackedLinear

GROUP = 32
LANES = 16
MOST_KEPT = 4096
"""Calls that a thread keeps: see `_multiply_into`."""
FP16_MAX = torch.finfo(torch.float16).max


class _Kept(local):
    """The calls of a thread."""

    def __init__(self) -> None:
        self.calls: dict[tuple[Any, ...], native.Linear] = {}


_KEPT = _Kept()
_PLACE = Tensor.data_ptr


class GroupedLinear(PackedLinear):
    """A linear layer with its weight ``[N, C]`` in groups; ``C`` is a multiple of 32."""

    dtypes = tuple(dtype for dtype in native.DTYPES if dtype.is_floating_point)
    bits: int
    dtype: torch.dtype
    """Of the weight that it gives."""

    @classmethod
    def held(cls) -> tuple[str, ...]:
        return "packed", "bits", "dtype"

    def pack(self, weight: Tensor) -> None:
        self.packed, self.dtype = _pack(weight.float(), self.bits), weight.dtype

    def dense(self) -> Tensor:
        return _unpack(self.packed, self.bits)[: self.out_features].to(self.dtype)

    def multiply(self, rows: Tensor) -> Tensor:
        multiply = GROUPED if torch.compiler.is_dynamo_compiling() else _multiply
        biases = [] if self.bias is None else [self.bias]
        out: Tensor = multiply(rows, [self.packed], biases, [self.out_features], self.bits)
        return out

    def pack_applied(self, fn: Callable[[Tensor], Tensor]) -> None:
        like = fn(torch.empty(0, dtype=self.dtype, device="cpu"))
        self.refuse_unpackable(like)
        self.dtype = like.dtype  # codes stay, and so do their ranges


def packs(weight: Tensor) -> bool:
    """Whether a weight can be packed in groups."""
    return (
        weight.device.type == "cpu" and weight.dtype in GroupedLinear.dtypes and weight.shape[1] % GROUP == 0
    )


def _pack(weight: Tensor, bits: int) -> Tensor:
    outputs, channels = weight.shape
    groups = F.pad(weight, (0, 0, 0, -outputs % LANES)).view(-1, LANES, channels // GROUP, GROUP)
    if bits == 4:
        low, high = groups.aminmax(dim=-1)
        ranges = torch.stack(((high - low) / 15, low), 2)
    else:
        ranges = groups.abs().amax(-1)[:, :, None] / 127
    # Ranges [tiles, lanes, kinds, groups], in fp16 from here on.
    ranges = ranges.clamp(-FP16_MAX, FP16_MAX).half()
    scale = ranges[:, :, 0].float()
    zero = ranges[:, :, 1].float() if bits == 4 else -128 * scale
    whole = (groups - zero[..., None]) / scale[..., None].where(scale[..., None] > 0, 1)
    codes = whole.round_().clamp_(0, 2**bits - 1).to(torch.uint8)
    # [tiles, lanes, groups, vectors, pairs, 2]
    lanes = codes.view(*codes.shape[:3], -1, 16 // bits, 2).to(torch.int32)
    words = (lanes << _places(bits)).sum((-2, -1)).to(torch.int32)
    words = words.permute(0, 2, 3, 1).contiguous().view(torch.uint8).flatten(2)
    return torch.cat((words, ranges.permute(0, 3, 2, 1).contiguous().view(torch.uint8).flatten(2)), -1)


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """fp32 ``[N, C]``, ``N`` a multiple of 16."""
    tiles, groups, _ = packed.shape
    size = GROUP * LANES * bits // 8
    words = packed[..., :size].contiguous().view(torch.int32).view(tiles, groups, -1, LANES)
    # [tiles, groups, vectors, lanes, pairs, 2]
    codes = (words[..., None, None] >> _places(bits)) & (2**bits - 1)
    codes = codes.permute(0, 3, 1, 2, 4, 5).reshape(tiles, LANES, groups, GROUP)
    ranges = packed[..., size:].contiguous().view(torch.float16).view(tiles, groups, -1, LANES).float()
    scale = ranges[:, :, 0].mT[..., None]
    zero = ranges[:, :, 1].mT[..., None] if bits == 4 else -128 * scale
    return (codes * scale + zero).reshape(tiles * LANES, groups * GROUP)


def _places(bits: int) -> Tensor:
    """The bits of a lane from which each of its pairs of codes lie, int32 ``[pairs, 2]``."""
    low = torch.arange(0, 16, bits, dtype=torch.int32, device="cpu")
    return torch.stack((low, low + 16), 1)


@cache
def _native() -> Callable[[native.Linear], None] | None:
    isas = native.isas()
    return native.function("linear", isas[0]) if isas else None


def _multiply(
    x: Tensor, packed: Sequence[Tensor], biases: Sequence[Tensor], outputs: Sequence[int], bits: int
) -> Tensor:
    out = _shape(x, packed, biases, outputs)
    _multiply_into(x, *packed, *biases, outputs, bits, out=out)
    return out


def _multiply_into(x: Tensor, *given: Any, out: Tensor) -> None:
    """Products of rows ``[M, C]`` with weights, which are given before as many biases or none, how many
    outputs each has, and the bits of all: ``[M, N]`` of all after each other."""
    *tensors, outputs, bits = given
    run = _native()
    if run is None:
        weights, biases = tensors[: len(outputs)], tensors[len(outputs) :] or [None] * len(outputs)
        each = zip(out.split([*outputs], 1), weights, outputs, biases, strict=True)
        for found, weight, count, bias in each:
            found.copy_(F.linear(x, _unpack(weight, bits)[:count].to(x.dtype), bias))
        return
    x = x.contiguous()
    # A step asks for what the one before did, so this thread keeps what it asks of the library, but for
    # where `x` is and the outputs go. Python takes as long for a call as the library for a small product.
    key = (
        x.dtype,
        x.shape,
        bits,
        *outputs,
        *map(_PLACE, tensors),
        *[t.dtype for t in tensors[len(outputs) :]],
    )
    call = _KEPT.calls.get(key)
    if call is None:
        call = _call(x, tensors, outputs, bits)
        if len(_KEPT.calls) == MOST_KEPT:
            _KEPT.calls.clear()
        _KEPT.calls[key] = call
    call.x, call.out, call.threads = x.data_ptr(), out.data_ptr(), torch.get_num_threads()
    run(call)


def _call(x: Tensor, tensors: Sequence[Tensor], outputs: Sequence[int], bits: int) -> native.Linear:
    """What `_multiply_into` asks the library."""
    (rows, channels), count = x.shape, len(outputs)
    native.address(x, GroupedLinear.dtypes, rows, tensors[0].shape[1] * GROUP)
    call = native.Linear(None, rows, channels, bits, native.DTYPES[x.dtype], 0, count)
    for part, weight, size in zip(call.parts, tensors, outputs, strict=False):
        part.packed, part.outputs = weight.data_ptr(), size
    for part, bias, size in zip(call.parts, tensors[count:], outputs, strict=False):
        part.bias = native.address(bias, x.dtype, size)
    return call


def _shape(x: Tensor, packed: Any, biases: Any, outputs: Sequence[int], bits: int = 0) -> Tensor:
    return x.new_empty(x.shape[0], sum(outputs))


GROUPED = operator(
    "linear_grouped",
    "(Tensor x, Tensor[] packed, Tensor[] biases, int[] outputs, int bits) -> Tensor",
    _multiply,
    _shape,
    into=_multiply_into,
)
"""`_multiply` as the compiler takes it."""
MOST = native.LINEAR_PARTS
"""Weights that are multiplied with one input in one go."""
