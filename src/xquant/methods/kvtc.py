from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..calibration import Calibration, Expected
from ..catalogue import short
from ..models import AttentionView
from ..models.base import linear
from ..quant import Affine, Plain, Segment
from ..quant.affine import FP16_MAX
from .base import CALIBRATED_AT, OWN_TEXTS, SINK, TAIL, Method, Tensors, option, spans
from .codec import LayerCodec, by_block
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


@dataclass(frozen=True, kw_only=True)
class KVTC(Method):
    """KVTC (arXiv 2511.01815): the principal components of a token's keys in all layers, and of its values,
    in groups of equal width that dynamic programming chose; for caches at rest.

    Stores, of keys before RoPE and of values, integers of 2, 4 or 8 bits for each component that has bits,
    and an fp16 scale and zero for each group of a token: together at most ``b`` bits a value. The first 4
    tokens and the last 128 stay full. ``cache.save(path, pack="entropy")`` codes the integers.
    ``basis="joint"`` finds components of keys and values together, which loses far less.

    Differs from the paper: calibrated on text that the model writes, whose components are found exactly, not
    by a randomized SVD. Groups are of 16, 64, 256 or 1,024 components and begin at multiples of 16; the paper
    has groups of one component, too. Its 8-bit numbers are floating-point ones, here integers. It codes by
    DEFLATE, here zstd does it, and only in files.

    Examples:
        >>> from xquant import KVCache, KVTC, calibrate
        >>> text = tokenizer.decode(prompt.input_ids[0])
        >>> found = calibrate(model, tokenizer, "kvtc-2bit", text, context=64, windows=4)
        >>> cache = KVCache(model, KVTC(bits=4, tail=0), calibration=found)
        >>> cache.method.spec
        'kvtc-4bit:tail=0'
    """

    name = "kvtc"
    paper = "KVTC, arXiv 2511.01815"
    summary = "principal components of all layers, bits by dynamic programming"
    example = "kvtc-1bit"
    head_pattern = r"-(?P<bits>[\d.]+)bit"
    calibration_size = OWN_TEXTS
    calibrates_itself = True
    sized_by_calibration = True
    not_causal = "codes layers together"

    bits: float = option(help="bits a value", least=0.1, most=8)
    sink: int = option(4, SINK)
    tail: int = option(128, TAIL)
    span: int = option(0, "layers that are coded together; 0: all")
    basis: str = option(
        "apart", "components of keys and of values, or of both together", choices=("apart", "joint")
    )

    @property
    def head(self) -> str:
        return f"{self.name}-{short(self.bits)}bit"

    @property
    def causal(self) -> bool:
        return self.span == 1

    @property
    def calibrated_as(self) -> str:
        return replace(self, bits=CALIBRATED_AT, sink=4, tail=128, group=128).spec

    def kinds(self, view: AttentionView) -> dict[str, int]:
        """What has components of its own, in the order of a row, with its numbers of a token in a layer."""
        if self.basis == "joint":
            return {"state": view.state_width}
        return {"key": view.kv_width, "value": view.state_width - view.kv_width}

    def spans(self, layers: int) -> list[Sequence[int]]:
        """The numbers of the layers that are coded together, of so many."""
        return spans(range(layers), self.span or layers)

    def expected(self, views: Sequence[AttentionView]) -> dict[str, Expected]:
        wanted: dict[str, Expected] = {}
        for span in self.spans(len(views)):
            widths = {number: self.kinds(views[number]) for number in span}
            for kind in widths[span[0]]:
                count = sum(own[kind] for own in widths.values())
                size = (len(choices(count)),)
                wanted[f"{span[0]}.{kind}.error"] = Expected(size, torch.float32, least=0)
                for number, own in widths.items():
                    basis = Expected((count, own[kind]), torch.float16, -1, 1)
                    wanted[f"{number}.{kind}.basis"] = basis
            for number in span:
                size = (views[number].state_width,)
                wanted[f"{number}.mean"] = Expected(size, torch.float32, -FP16_MAX, FP16_MAX)
        return wanted

    def codecs(
        self, views: Sequence[AttentionView], calibration: Calibration | None = None
    ) -> list[LayerCodec]:
        found = self.found(views, calibration)
        codecs: list[LayerCodec] = []
        for numbers in self.spans(len(views)):
            groups, lowest = {}, found[numbers[0]]
            for kind in self.kinds(views[numbers[0]]):
                count = len(lowest[f"{kind}.basis"])
                groups[kind] = chosen(lowest[f"{kind}.error"], count, int(self.bits * count))
            if not any(groups.values()):
                raise ValueError(
                    f"{self.spec}: no group of components takes so few bits: take more bits, or"
                    " code more layers together"
                )
            span = [KVTCCodec(views[i], found[i], self.group, groups) for i in numbers]
            for codec in span:
                codec.join(span)
            codecs += span
        return codecs


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

    coded_together = True

    def __init__(
        self, view: AttentionView, found: Tensors, block: int, groups: Mapping[str, Sequence[Group]]
    ) -> None:
        super().__init__(view)
        self.block = block
        self.sink_dtype = torch.float16 if view.dtype.itemsize > 2 else None
        self.mean = found["mean"].to(view.device)  # [W]
        self._groups = [group for own in groups.values() for group in own]
        self._bases = [  # of each kind [components with bits, numbers of the layer]
            _rows(found[f"{kind}.basis"], own).to(view.device, torch.float32) for kind, own in groups.items()
        ]

    def join(self, span: "Sequence[KVTCCodec]") -> None:
        """Belong to a ``span`` of layers, bottom up."""
        self.span, self._layers = len(span), span
        packed = self._groups if self is span[0] else []
        # What packs nothing has blocks like the others, of no bytes.
        self.segments = tuple(Segment(group.size, Affine(group.bits, "token", 0)) for group in packed) or (
            Segment(0, Plain(torch.float16)),
        )

    @property
    def added(self) -> list[Tensor]:
        return [*super().added, *self._bases]

    def encode(self, features: Tensor, predicted: Tensor | None) -> Tensor:
        return features.float() - self.mean

    def combine(self, encoded: list[Tensor]) -> list[Tensor]:
        home = self._layers[0].view.device
        found = [
            torch.cat([part.to(home) for part in codec._components(rows)], -1)
            for codec, rows in zip(self._layers, encoded, strict=True)
        ]
        nothing = [rows[..., :0] for rows in encoded[1:]]
        return [torch.stack(found).sum(0), *nothing]

    def _components(self, rows: Tensor) -> list[Tensor]:
        """What rows ``[N, n, W]`` of the layer add to the components of its span, of each kind."""
        parts = rows[None].split([basis.shape[1] for basis in self._bases], -1)
        pairs = zip(parts, self._bases, strict=True)
        return [by_block(own, basis, self.block)[0] for own, basis in pairs]

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
