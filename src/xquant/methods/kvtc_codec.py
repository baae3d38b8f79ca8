"""The codec of KVTC, and the dynamic program that deals out its bits."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..models import AttentionView
from ..models.base import linear
from ..quant import Affine, Plain, Segment
from .codec import by_block
from .cost import RebuildCost
from .key_value import StateCodec

UNIT = 16
"""Components of the smallest group. Groups begin at multiples of it."""
SIZES = (1, 4, 16, 64)
"""Of groups, in units."""
WIDTHS = (2, 4, 8)
"""Bits of a component."""
RANGE_BITS = 32
"""Of the scale and zero of a group of a token."""


class Group(NamedTuple):
    """Neighbouring components of one width that share a range."""

    start: int
    size: int
    bits: int


def choices(components: int) -> list[Group]:
    """All groups of so many components, by where they begin; ``bits`` is 0 where they are left out. The last
    may have fewer components than a unit."""
    units = -(-components // UNIT)
    return [
        Group(start * UNIT, min(size * UNIT, components - start * UNIT), bits)
        for start in range(units)
        for size in SIZES
        if start + size <= units
        for bits in ((0, *WIDTHS) if size == SIZES[0] else WIDTHS)
    ]


def chosen(error: Tensor, components: int, budget: int) -> list[Group]:
    """The groups with bits that lose least of so many components, for at most ``budget`` bits a token.

    Args:
        error: what each of the `choices` loses, ``[.]``. Where none loses less than others, as where nothing
            was measured yet, bits are spent all the same.
    """
    budget //= RANGE_BITS
    ends: list[list[tuple[Group, float]]] = [[] for _ in range(-(-components // UNIT) + 1)]
    for group, lost in zip(choices(components), error.tolist(), strict=True):
        ends[-(-(group.start + group.size) // UNIT)].append((group, lost))
    free = torch.zeros(budget + 1, dtype=torch.float64, device="cpu")
    least = [free]  # by the bits that may be spent
    best: list[Tensor] = []
    for groups in ends[1:]:
        lost = torch.full_like(free, torch.inf)
        which = torch.zeros_like(free, dtype=torch.long)
        for number, (group, own) in enumerate(groups):
            price = _price(group)
            if price > budget:
                continue
            before = least[group.start // UNIT]
            total = before[: budget + 1 - price] + own
            better = total <= lost[price:]
            lost[price:] = total.where(better, lost[price:])
            which[price:].masked_fill_(better, number)
        least.append(lost)
        best.append(which)
    found, end = list[Group](), len(best)
    while end:
        group, _ = ends[end][int(best[end - 1][budget])]
        budget -= _price(group)
        end = group.start // UNIT
        found.append(group)
    return [group for group in reversed(found) if group.bits]


def _price(group: Group) -> int:
    """What a group of a token takes, in `RANGE_BITS`; of a last one that is not full, as if it were."""
    if not group.bits:
        return 0
    return 1 + -(-group.size // UNIT) * UNIT * group.bits // RANGE_BITS


class KVTCCodec(StateCodec):
    """Keeps keys before RoPE and values; the lowest layer of a span packs the components of all its layers.

    Args:
        found: the calibrated tensors of the layer.
        block: tokens of a sealed block.
        groups: of each kind of components (`KVTC.kinds`), the same for all layers of the span.
    """

    mixes = True

    def __init__(
        self,
        view: AttentionView,
        found: dict[str, Tensor],
        block: int,
        groups: Mapping[str, Sequence[Group]],
    ) -> None:
        super().__init__(view)
        self.block = block
        self.sink_dtype = torch.float16 if view.dtype.itemsize > 2 else None
        self.mean = found["mean"].to(view.device)  # [W]
        self._groups = [group for own in groups.values() for group in own]
        self._bases = [  # of each kind [components with bits, numbers of the layer]
            _rows(found[f"{kind}.basis"], own).to(view.device, torch.float32)
            for kind, own in groups.items()
        ]

    def join(self, span: "Sequence[KVTCCodec]") -> None:
        """Belong to a ``span`` of layers, bottom up."""
        self.span, self._layers = len(span), span
        packed = self._groups if self is span[0] else []
        # What packs nothing has blocks like the others, of no bytes.
        self.segments = tuple(
            Segment(group.size, Affine(group.bits, "token", 0)) for group in packed
        ) or (Segment(0, Plain(torch.float16)),)

    @property
    def added(self) -> list[Tensor]:
        return [*super().added, *self._bases]

    def encode(self, features: Tensor, predicted: Tensor | None) -> Tensor:
        return features.float() - self.mean

    def mix(self, encoded: list[Tensor]) -> list[Tensor]:
        home = self._layers[0].view.device
        found = [
            torch.cat([part.to(home) for part in codec._components(rows)], -1)
            for codec, rows in zip(self._layers, encoded, strict=True)
        ]
        nothing = [rows[..., :0] for rows in encoded[1:]]
        return [torch.stack(found).sum(0), *nothing]

    def _components(self, rows: Tensor) -> list[Tensor]:
        """What rows ``[N, n, W]`` of the layer add to the components of its span, of each kind."""
        parts = rows.flatten(0, 1)[None].split([basis.shape[1] for basis in self._bases], -1)
        return [
            by_block(own, basis, self.block).view(*rows.shape[:2], len(basis))
            for own, basis in zip(parts, self._bases, strict=True)
        ]

    def recall(self, rows: Tensor, predicted: Tensor | None, sealing: bool = True) -> Tensor:
        parts = rows.float().split([len(basis) for basis in self._bases], -1)
        states = [linear(own, basis.T) for own, basis in zip(parts, self._bases, strict=True)]
        return torch.cat(states, -1).add_(self.mean).to(rows.dtype)

    @property
    def rebuild_cost(self) -> RebuildCost | None:
        # No kernel attends to components, so how often they are multiplied is not known.
        return None


def _rows(basis: Tensor, groups: Sequence[Group]) -> Tensor:
    """The components of a basis that have bits."""
    return torch.cat([basis[:0], *(basis[g.start : g.start + g.size] for g in groups)])
