"""TriedPacker: what ``auto`` packs and unpacks with on a GPU."""

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from ...past.packer import TORCH, Packer
from ...quant import Packed, Quantizer, Ragged
from ...quant.quantizer import dense
from ..trial import failure_of, remembered
from . import TritonPacker, support


class TriedPacker(Packer):
    """Packs by Triton what has the same bytes as torch's, and unpacks what has the same numbers: the first
    block of a kind is compared. The rest is torch's."""

    def __init__(self) -> None:
        self._own = TritonPacker()

    def pack(self, quantizer: Quantizer, x: Tensor, excluded: Tensor | None) -> Packed:
        if not support.seals(quantizer, x):
            return TORCH.pack(quantizer, x, excluded)
        key = kind("pack", quantizer, x)
        if failure_of(key) is None:
            hidden = None if excluded is None else excluded[:1]
            expected = TORCH.pack(quantizer, x[:1], hidden)  # raises for what cannot be packed

            def compare() -> str:
                same = equal(self._own.pack(quantizer, x[:1], hidden), expected)
                return "" if same else "triton packs other bytes than torch"

            tried(key, compare, "blocks are packed", x)
        return self._taken(key).pack(quantizer, x, excluded)

    def unpack(self, quantizer: Quantizer, packed: Packed, out: Tensor) -> None:
        if not support.decodes(quantizer, out):
            return TORCH.unpack(quantizer, packed, out)
        key = kind("unpack", quantizer, out)
        if failure_of(key) is None:
            first: Packed = {name: dense(packed, name)[:1] for name in packed}
            found, expected = (torch.empty_like(out[:1]) for _ in range(2))
            TORCH.unpack(quantizer, first, expected)

            def compare() -> str:
                self._own.unpack(quantizer, first, found)
                return "" if torch.equal(found, expected) else "triton reads other numbers than torch"

            tried(key, compare, "blocks are read", out)
        self._taken(key).unpack(quantizer, packed, out)

    def joins(self, quantizer: Quantizer, x: Tensor) -> bool:
        return self._own.joins(quantizer, x) and failure_of(kind("pack", quantizer, x)) == ""

    def _taken(self, key: Hashable) -> Packer:
        return TORCH if failure_of(key) else self._own


def kind(what: str, quantizer: Quantizer, rows: Tensor) -> Hashable:
    """What kernels are compiled for, and run on, for blocks ``[N, n, C]``."""
    operand = quantizer.operand(*rows.shape[1:])
    layout = None if operand is None else operand.layout
    return what, type(quantizer), layout, rows.shape[1:], rows.dtype, rows.device


def tried(key: Hashable, compare: Callable[[], str], what: str, rows: Tensor) -> None:
    of = f"{what}, {list(rows.shape[1:])} of {rows.dtype}"
    remembered(key, "triton", compare, what, of, rows.device)


def equal(found: Packed, expected: Packed) -> bool:
    """Whether both have the same numbers."""
    if found.keys() != expected.keys():
        return False
    pairs = ((found[name], expected[name]) for name in expected)
    return all(torch.equal(*(t.flat() if isinstance(t, Ragged) else t for t in p)) for p in pairs)
