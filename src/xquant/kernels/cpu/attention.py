"""Attention by the native library, over packed keys and values: csrc/attention.h.

A `Kernel` is one of the library's functions for one layer. It fills in what a call asks and how the layer is
packed. Where blocks and exact tokens lie is told by whoever has the memory: `growing` or `paged`.

`PackedKernel` computes ``softmax(Q K^T) V`` with keys and values read from their codes, a block and head at a
time, by an online softmax; tail, sinks and the newest tokens are read as they are. It equals attention over
`CompressedLayer.read`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...methods import LayerCodec
from ...models import AttentionView
from ...models.rotation import Pair
from ...past.sequences import Sequences
from ...quant.operand import Operand
from ..backend import uncoded
from ..call import AttentionCall, mask_strides
from ..rope import BlockAngles
from . import library as native

Angles = Pair | BlockAngles
"""Of every token ``[B, R/2, T]``, ``B`` may be 1; or of blocks."""


class Kernel(ABC):
    """Attends over one layer.

    Args:
        to: the call of its function, or the part of it that all functions have.
        sources: the fields that are pointed to the blocks of these segments.
        block: tokens of a block.
    """

    angles_by_token = False
    """Whether each packed key may have its own angles, where positions within a block do not follow each
    other."""
    repeats = False
    """Whether `repeat` can answer a call like the newest one."""
    _function: Callable[[Any], None]
    _asked: Any
    """What its function of the library is called with."""

    def __init__(self, to: native.Attend, sources: dict[int, Any], view: AttentionView, block: int) -> None:
        self.to, self.sources = to, sources
        self.columns = 0
        """Of the table, that are read of a cache that grows."""
        to.block, to.kv_heads, to.head_size = block, view.kv_heads, view.head_size
        to.group_heads = view.query_heads // view.kv_heads

    def point_to_blocks(self, fields: Sequence[dict[str, Tensor]]) -> None:
        """Read packed blocks at these addresses, int64 ``[N]`` of every field by segment."""
        self._addresses = [fields[number] for number in self.sources]
        for to, named in zip(self.sources.values(), self._addresses, strict=True):
            for name, blocks in named.items():
                setattr(to, name, blocks.data_ptr())

    @abstractmethod
    def set_angles(self, angles: Angles) -> None:
        """Have RoPE rotate packed keys by these ``angles`` from now on."""

    @abstractmethod
    def attend(self, call: AttentionCall, out: Tensor, sequences: Sequences | None = None) -> None:
        """Answer a ``call``, where all that it reads is pointed to.

        Args:
            call: its queries ``[B, H, t, D]``, or of the ``sequences`` of an engine ``[T, H, D]``.
            out: ``[B, t, H, D]`` or ``[T, H, D]``, written to.

        Raises:
            MemoryError: the library has none.
        """

    def repeat(self, query: Tensor, out: Tensor) -> None:
        """`attend` once more: queries and output lie elsewhere, all else is the same, or pointed to."""
        self.to.query, self.to.out = query.data_ptr(), out.data_ptr()
        self._run()

    def _run(self) -> None:
        """Have the library answer what is pointed to."""
        self._function(self._asked)

    def _point_to_scores(self, call: AttentionCall) -> Tensor | None:
        """How scores are made, but for what they are multiplied with. Returns what is pointed to."""
        to, mask, logits = self.to, call.mask, call.float_logits
        to.softcap, to.mask, to.sink_logits = call.softcap or 0.0, None, None
        if mask is not None:
            to.mask, to.mask_dtype = mask.data_ptr(), native.DTYPES[mask.dtype]
            to.mask_batch, to.mask_query, to.mask_token = mask_strides(mask)
        if logits is not None:
            to.sink_logits = logits.data_ptr()
        return logits

    def _point_to_states(self, query: Tensor, out: Tensor, scaling: float) -> None:
        """The queries, and where their attention goes."""
        to = self.to
        to.dtype, to.scaling = native.DTYPES[query.dtype], scaling
        to.query, to.out = query.data_ptr(), out.data_ptr()
        if query.dim() == 4:
            to.query_batch, to.query_head, to.query_token, _ = query.stride()
            to.out_batch, to.out_token, to.out_head, _ = out.stride()
        else:  # a sequence has the rows from one on
            to.query_batch, to.query_head, _ = query.stride()
            to.out_batch, to.out_head, _ = out.stride()
            to.query_token, to.out_token = to.query_batch, to.out_batch


class PackedKernel(Kernel):
    """Attends over packed keys and values."""

    def __init__(self, codec: LayerCodec, block: int, isa: str) -> None:
        to = native.Attend()
        super().__init__(to, {0: to.key, 1: to.value}, codec.view, block)
        self._function, self._asked = native.function("attend", isa), to
        self._key_matrix = codec.rotations[0]
        self.repeats = self._key_matrix is None
        self._constant: list[Tensor] = []
        for number, operand in self.sources.items():
            packed = codec.segments[number].operand(block)
            assert isinstance(packed, Operand)
            self._constant += describe(operand, packed)
        if codec.offset is not None:
            offset = codec.offset.float().contiguous()
            self._constant.append(offset)
            to.key.offset = native.address(offset, torch.float32, codec.view.kv_width)
        matrix = codec.rotations[1]
        if matrix is not None:
            matrix = matrix.contiguous()
            self._constant.append(matrix)
            to.value_turn = native.address(matrix, torch.float32, *matrix.shape)
            to.value_turn_head = 0 if matrix.dim() == 2 else matrix.stride(0)

    def set_angles(self, angles: Angles) -> None:
        assert isinstance(angles, BlockAngles)
        (within, start), to = angles, self.to
        if "cpu" not in within.prepared:
            within.prepared["cpu"] = native.rope_table(*within.angles)
        to.rope_table = within.prepared["cpu"].data_ptr()
        to.start_cos, to.start_sin = (native.address(t, torch.float32, *start[0].shape) for t in start)
        to.start_batch, self._angles = batch_stride(start[0]), angles

    def attend(self, call: AttentionCall, out: Tensor, sequences: Sequences | None = None) -> None:
        query, kept = call.query, self._point_to_scores(call)
        if self._key_matrix is not None:
            query, rotated = torch.stack([query, rotate(query, self._key_matrix)])
            self.to.turned_query = rotated.data_ptr()
        self._point_to_states(query, out, call.scaling)
        self._run()
        del kept  # the library has read it


def batch_stride(of: Tensor) -> int:
    """0 where one sequence stands for all."""
    return of.stride(0) if len(of) > 1 else 0


def rotate(query: Tensor, matrix: Tensor) -> Tensor:
    """Queries ``[B, H, t, D]`` or ``[T, H, D]`` times the matrix ``[D, D]`` of keys, or ``[G, D, D]``."""
    groups = 1 if matrix.dim() == 2 else len(matrix)
    split = (groups, -1) if query.dim() == 4 else (groups, -1, 1)
    heads = query.float().unflatten(1, split)
    own = matrix if matrix.dim() == 2 else matrix[:, None]
    return (heads @ own.mT).flatten(1, len(split)).to(query.dtype)


def unfit(codec: LayerCodec, block: int) -> str:
    """Why the library cannot read packed keys and values of a layer; empty where it can."""
    view = codec.view
    if view.device.type != "cpu":
        return f"the layer is on {view.device.type}"
    if view.dtype not in native.DTYPES:
        return f"{view.dtype} states"
    if view.head_size % 8 or block % 32:
        return f"heads of {view.head_size} in blocks of {block}: multiples of 8 and of 32 are read"
    if not codec.rotated and view.rotary_size != view.head_size:
        return "the rotary embedding rotates a part of a head"
    if why := uncoded(codec, block):
        return why
    keys, values = (segment.operand(block) for segment in codec.segments)
    assert isinstance(keys, Operand) and isinstance(values, Operand)
    if codec.offset is not None and keys.per_token:
        return "a key bias beside ranges per token"
    return _unfit_operand(keys, "key", block) or _unfit_operand(values, "value", block)


def _unfit_operand(operand: Operand, role: str, block: int) -> str:
    if operand.levels is not None and operand.bits > 4:
        return f"a table of {2**operand.bits} levels for {role}s"
    size, tokens = operand.group, not operand.per_token
    # The kernel reads keys by 32 tokens and 4 channels, values by all tokens.
    if role == "value":
        fits = size >= block or not tokens
    else:
        fits = (size % 32 == 0 or size >= block) if tokens else size % 4 == 0
    return "" if fits else f"ranges of {size} {'tokens' if tokens else 'channels'} for {role}s"


def describe(to: native.Operand, operand: Operand) -> list[Tensor]:
    """Set what does not change of a packed operand. Returns what is pointed to."""
    to.bits, to.per_token, to.group = operand.bits, operand.per_token, operand.group
    to.count_bytes, to.zero_scales = operand.count_bytes, operand.zero_scales or 0.0
    if operand.levels is None:
        return []
    levels = operand.levels.float().contiguous()
    to.levels = native.address(levels, torch.float32, 2**operand.bits)
    if operand.offline is None:
        return [levels]
    to.offline = 1
    scale, zero = (t.contiguous() for t in operand.offline)
    found = [[native.address(t, torch.float16, operand.channels)] for t in (scale, zero)]
    addresses = torch.tensor(found, dtype=torch.int64, device="cpu")
    to.scale, to.zero = addresses[0].data_ptr(), addresses[1].data_ptr()
    return [levels, scale, zero, addresses]
