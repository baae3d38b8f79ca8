"""What the Triton kernels read, and where they can run; known without importing Triton."""

import os
from functools import cache
from importlib.util import find_spec
from typing import TypeGuard

import torch
from packaging.version import Version
from torch import Tensor

from ...methods import LayerCodec
from ...methods.codec import Rematerialized
from ...quant import Affine, Codebook, Quantizer, Segment
from ...quant.operand import Operand, RankedOperand
from ...quant.ranked import Ranked
from ..backend import uncoded

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_ELEMENTS = 1 << 15
"""Of a head in a block, which a program holds in registers."""
MOST_CHANNELS = 31743
"""Of a token with outliers. Their numbers are compared as fp16 ones, of which greater would be no number."""
MOST_DECODED = 512
"""Tokens of a block of ranked codes, of 32 channels of which a program holds the states."""
OLDEST = Version("3.5")
"""Of Triton: the first with functions that are evaluated as a kernel is compiled."""


@cache
def installed() -> bool:
    return find_spec("triton") is not None


@cache
def outdated() -> str:
    """The version of Triton where it is too old; imports it."""
    import triton

    return triton.__version__ if Version(triton.__version__) < OLDEST else ""


def interpreted() -> bool:
    """Whether Triton runs on the CPU, which is how the tests run it."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def missing(device: torch.device) -> str:
    """Why the kernels cannot run on ``device``; empty where they can."""
    if not installed():
        return "Triton is not installed"
    if device.type != "cuda" and not (device.type == "cpu" and interpreted()):
        return f"the layer is on {device.type}, and Triton's kernels run on cuda"
    return f"Triton {outdated()} is too old: {OLDEST} or later is needed" if outdated() else ""


def unfit(codec: LayerCodec, block: int) -> str:
    """Why the kernels cannot read a layer; empty where they can."""
    view = codec.view
    if view.dtype not in DTYPES:
        return f"{view.dtype} states"
    if view.head_size % 32 or block % 32:
        return f"heads of {view.head_size} in blocks of {block}: both must be multiples of 32"
    if power(view.head_size) * power(block) > MOST_ELEMENTS:
        return f"heads of {view.head_size} in blocks of {block} are more than a program holds"
    if not codec.rotated and view.rotary_size != view.head_size:
        return "the rotary embedding rotates a part of a head"
    if any(matrix is not None for matrix in codec.rotations):
        return "heads are packed times a matrix"
    rebuilt = codec.rematerialized
    if rebuilt is not None:
        return _unfit_rebuilt(rebuilt, block)
    operands = [segment.operand(block) for segment in codec.segments]
    if any(isinstance(o, Operand) and o.zero_scales is not None for o in operands):
        return "ranges without a zero"
    if any(isinstance(o, Operand) and o.count_bytes and o.channels > MOST_CHANNELS for o in operands):
        return f"outliers among more than {MOST_CHANNELS} channels"
    return uncoded(codec, block)


def _unfit_rebuilt(codec: Rematerialized, block: int) -> str:
    """The same of a layer whose keys and values are rebuilt."""
    if isinstance(codec.segments[0].operand(block), RankedOperand):
        # Read in place, they took some 20 times as long as fp16 by the instructions of the kernels.
        return "ranked codes, which are decoded once and multiplied by torch"
    keys, values = (affine(segment, block) for segment in (codec.segments[0], codec.segments[-1]))
    if keys is None or values is None:
        return "what keys and values come from has no affine codes"
    if codec.view.key_norm is not None and codec.view.key_gain() is None:
        return "keys are normalized in a way of their own"
    if codec.sums_deltas:
        return ""
    if keys.channels != codec.key_weight.shape[1] or not values.per_token:
        return "not all that keys or values come from is quantized alike"
    if not (_in_tiles(keys, block) and _in_tiles(values, block)):
        return f"states of {keys.channels} channels in blocks of {block}"
    by_token = values.tile is not None and values.tile.lanes == "tokens"
    if values.group % 32 or (by_token and power(values.group) * power(block) > MOST_ELEMENTS):
        return f"ranges of {values.group} channels in blocks of {block}"
    return ""


def affine(segment: Segment, block: int) -> Operand | None:
    """How a segment is packed, where its codes are affine."""
    operand = segment.operand(block)
    return operand if isinstance(operand, Operand) and operand.levels is None else None


def tiled(segment: Segment, block: int) -> bool:
    """Whether the kernels that multiply states can read their codes."""
    operand = affine(segment, block)
    return operand is not None and _in_tiles(operand, block)


def _in_tiles(operand: Operand, block: int) -> bool:
    tile = operand.tile
    return tile is not None and tile.whole and tile.fits(block)


def power(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()


def seals(quantizer: Quantizer, x: Tensor) -> TypeGuard[Affine | Codebook]:
    """Whether a kernel packs blocks ``x`` ``[N, n, C]``. Quantizers of these classes and no other: one that
    is derived from them may do something else."""
    if type(quantizer) not in (Affine, Codebook) or x.dtype not in DTYPES or not x.numel():
        return False
    assert isinstance(quantizer, Affine | Codebook)
    tile = quantizer.tile
    if tile is None or not tile.whole or not tile.fits(x.shape[1]):
        return False
    fits = power(tile.head) * power(x.shape[1]) <= MOST_ELEMENTS
    return fits and not missing(x.device)


def decodes(quantizer: Quantizer, out: Tensor) -> TypeGuard[Ranked]:
    """Whether a kernel unpacks blocks into ``out`` ``[N, n, C]``."""
    if type(quantizer) is not Ranked or out.dtype not in DTYPES or not out.numel():
        return False
    return out.stride(-1) == 1 and out.shape[1] <= MOST_DECODED and not missing(out.device)
