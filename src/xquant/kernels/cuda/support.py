"""What the CUDA kernels read, and where they can run."""

import torch

from ...methods import LayerCodec
from ...quant.operand import Operand
from ..backend import uncoded
from . import program

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Of states, by the number that kernels know them by."""
BITS = (1, 2, 4, 8)
BLOCKS = (32, 64, 128)
HEADS = (64, 128)
LEAST_KEY_BITS = 128
"""Of a head of a token: a word for each of the four threads that share it."""
OLDEST = (8, 0)
"""The compute capability that the instructions want."""


def missing(device: torch.device) -> str:
    """Why the kernels cannot run on ``device``; empty where they can."""
    if device.type != "cuda" or torch.version.hip:
        return f"the layer is on {device.type}, and these kernels run on NVIDIA's GPUs"
    if torch.cuda.get_device_capability(device) < OLDEST:
        return f"a compute capability of {'.'.join(map(str, OLDEST))} or more is wanted"
    try:
        program.nvrtc()
    except OSError:
        return "there is no NVRTC, which compiles them"
    return ""


def unfit(codec: LayerCodec, block: int) -> str:
    """Why the kernels cannot read a layer; empty where they can."""
    view = codec.view
    if view.dtype not in DTYPES:
        return f"{view.dtype} states"
    if view.head_size not in HEADS or block not in BLOCKS:
        return f"heads of {view.head_size} in blocks of {block}"
    if codec.rematerialized is not None:
        return "keys are rebuilt from other states"
    if not codec.rotated and view.rotary_size != view.head_size:
        return "the rotary embedding rotates a part of a head"
    if any(matrix is not None for matrix in codec.rotations):
        return "heads are packed times a matrix"
    if why := uncoded(codec, block):
        return why
    keys, values = (segment.operand(block) for segment in codec.segments)
    if not isinstance(keys, Operand) or not isinstance(values, Operand):
        return "codes of another kind"
    return _unread(keys, values, codec, block)


def _unread(keys: Operand, values: Operand, codec: LayerCodec, block: int) -> str:
    size = codec.view.head_size
    for operand in (keys, values):
        if operand.bits not in BITS:
            return f"codes of {operand.bits} bits"
        if operand.levels is not None or operand.count_bytes or operand.offline is not None:
            return "codes of a table, outliers or ranges that all blocks share"
        if operand.zero_scales is not None or operand.second:
            return "ranges without a zero, or with a second scale"
        if operand.tile is None or not operand.tile.fits(block):
            return "codes that do not lie in tiles"
    if keys.bits * size < LEAST_KEY_BITS:
        return f"keys of {keys.bits} bits in heads of {size}"
    whole_heads = not values.group % size
    if not values.per_token or not whole_heads:
        return "ranges of values that are not of a token and whole heads"
    if keys.per_token:
        if keys.group % size or not codec.rotated or codec.offset is not None:
            return "ranges per token of keys before RoPE, or of parts of a head"
    elif keys.group < block:
        return f"ranges of {keys.group} tokens of keys"
    return ""
