"""Products with packed blocks of keys or values, in torch."""

from math import gcd
from typing import Any, Literal

import torch
from torch import Tensor

from ...quant import Packed, Segment
from ...quant.operand import Operand
from ...quant.quantizer import dense

Lanes = Literal["tokens", "channels"]


def product_of(segment: Segment, heads: int, block: int, lanes: Lanes) -> "PackedProduct | DecodedProduct":
    """What multiplies with the blocks of a segment, which have no outliers."""
    coded = isinstance(segment.operand(block), Operand)
    return (PackedProduct if coded else DecodedProduct)(segment, heads, block, lanes)


class PackedProduct:
    """Multiplies with the keys or the values of a layer, whose blocks are codes and ranges and no outliers.

    Letters: ``M`` lanes, and ``K`` what is summed over: tokens and channels of a head for keys, channels and
    tokens for values. ``m`` and ``k`` count their runs of one scale and zero.
    """

    def __init__(self, segment: Segment, heads: int, block: int, lanes: Lanes) -> None:
        operand = segment.operand(block)
        assert isinstance(operand, Operand)
        self._quantizer: Any = segment.quantizer
        self._operand, self._heads, self._block = operand, heads, block
        self._by_token = lanes == "tokens"

    def times(self, left: Tensor, packed: Packed) -> Tensor:
        """``left`` ``[B, c | 1, G, q, K]`` times the blocks ``[B * c, ...]``: ``[B, c, G, q, M]``."""
        batch = len(left)
        product = self._product(left, *self._codes(packed, batch))
        return product * self._second(packed, batch) if self._operand.second else product

    def _product(self, left: Tensor, codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        lanes, summed = scale.shape[-2:]
        # Folding into many rows would cost more than scaling the codes.
        if summed == left.shape[-1] and lanes * left.shape[-2] <= codes.shape[-2]:
            folded = left.unsqueeze(-3) * scale.unsqueeze(-2)  # [B, c, G, m, q, K]
            sums = folded @ codes.unflatten(-2, (lanes, -1)).mT + (zero @ left.mT).unsqueeze(-1)
            return sums.movedim(-3, -2).flatten(-2)
        if summed == 1:
            offset = left.sum(-1, keepdim=True) * zero.mT
            return torch.addcmul(offset, left @ codes.mT, scale.mT)
        return left @ _scaled(codes, scale, zero).mT

    def states(self, packed: Packed, batch: int) -> Tensor:
        """What the blocks decode to, fp32 ``[B, c, G, M, K]``."""
        states = _scaled(*self._codes(packed, batch))
        return states * self._second(packed, batch).mT if self._operand.second else states

    def _second(self, packed: Packed, batch: int) -> Tensor:
        """``[B, c, G, 1, M]``."""
        return self._quantizer.second(packed, self._block).unflatten(0, (batch, -1)).unsqueeze(-2)

    def _codes(self, packed: Packed, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Codes as numbers, or the levels they stand for, ``[B, c, G, M, K]``; scale and zero
        ``[B | 1, c | 1, G, m, k]``, one of the two a run each."""
        operand, stored = self._operand, dense(packed, "codes")
        if operand.tile is not None and operand.tile.fits(self._block):
            codes = operand.tile.rows(stored, operand.bits, self._block, operand.channels)
        else:
            codes = self._quantizer.unpack(stored, self._block, operand.channels)
            codes = self._by_head(codes)
        if operand.levels is not None:
            levels = operand.levels.to(codes.device).float()
            numbers = levels.index_select(0, codes.flatten().int()).view(codes.shape)
        else:
            numbers = codes.float()
        if operand.offline is None:
            ranges = self._quantizer.unpack_ranges(packed, self._block)
        else:
            ranges = [t.to(codes.device).expand(batch, 1, -1) for t in operand.offline]
        scale, zero = (self._runs(t.float()).unflatten(0, (batch, -1)) for t in ranges)
        return numbers.unflatten(0, (batch, -1)), scale, zero

    def _runs(self, ranges: Tensor) -> Tensor:
        """Scales or zeros ``[N, n, ranges]`` or ``[N, ranges, C]`` as ``[N, G, m, k]``. A range that
        spans heads, or is followed by a shorter one, becomes several runs."""
        per_token, channels = self._operand.per_token, self._operand.channels
        along = channels if per_token else self._block
        size = min(self._operand.group, along)
        run = gcd(size, channels // self._heads if per_token else along)
        if run < size:
            dim = -1 if per_token else -2
            ranges = ranges.repeat_interleave(size // run, dim).narrow(dim, 0, along // run)
        return self._by_head(ranges)

    def _by_head(self, rows: Tensor) -> Tensor:
        """Rows ``[N, n, C]``, or something of each, as ``[N, G, M, K]``."""
        heads = rows.unflatten(-1, (self._heads, -1)).transpose(1, 2)
        return heads if self._by_token else heads.mT


class DecodedProduct:
    """The same of blocks that no kernel has a format of: they are decoded."""

    def __init__(self, segment: Segment, heads: int, block: int, lanes: Lanes) -> None:
        self._segment, self._heads, self._block = segment, heads, block
        self._by_token = lanes == "tokens"

    def times(self, left: Tensor, packed: Packed) -> Tensor:
        """As of `PackedProduct`."""
        return left @ self.states(packed, len(left)).mT

    def states(self, packed: Packed, batch: int) -> Tensor:
        """As of `PackedProduct`."""
        name = next(iter(self._segment.fields(self._block)))
        stored = dense(packed, name)
        shape = len(stored), self._block, self._segment.channels
        rows = torch.empty(shape, dtype=torch.float32, device=stored.device)
        self._segment.quantizer.decode(packed, rows)
        heads = rows.unflatten(-1, (self._heads, -1)).transpose(1, 2).unflatten(0, (batch, -1))
        return heads if self._by_token else heads.mT


def _scaled(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """``codes * scale + zero``, written over ``codes`` ``[B, c, G, M, K]``."""
    lanes, summed = scale.shape[-2:]
    by_run = codes.unflatten(-1, (summed, -1)).unflatten(-3, (lanes, -1))
    by_run.mul_(scale[..., None, :, None]).add_(zero[..., None, :, None])
    return codes
