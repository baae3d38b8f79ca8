"""Codes of vectors: some channels side by side, divided by the size of their head, have one code together."""

from abc import abstractmethod
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import combinations
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import pad as padded

from .affine import FP16_MAX, checked, divisor
from .pack import pack, packed_rows, unpack
from .quantizer import Field, Packed, Quantizer, dense

AT_ONCE = 8192
"""Vectors whose nearest points are looked for together."""


@dataclass(frozen=True, eq=False)
class Vectors(Quantizer):
    """``x ~ point[code] * scale`` for every ``dim`` channels of a token, with an fp16 scale for every
    ``group`` channels: their root mean square. The last vector of a group is filled up with 0.

    Args:
        group: channels of a head.
    """

    group: int
    dim: ClassVar[int]
    """Channels of a vector."""

    @property
    @abstractmethod
    def code_bits(self) -> tuple[int, ...]:
        """Of the parts of a code."""

    @abstractmethod
    def nearest(self, x: Tensor) -> Tensor:
        """The codes, uint8 ``[M, parts]``, of the points nearest to vectors ``[M, dim]``."""

    @abstractmethod
    def points(self, codes: Tensor) -> Tensor:
        """The points ``[M, dim]`` of codes ``[M, parts]``."""

    def encode(self, x: Tensor, excluded: Tensor | None) -> Packed:
        x = checked(x).float()
        groups = padded(x, (0, -x.shape[-1] % self.group)).unflatten(-1, (-1, self.group))
        scale = groups.square().mean(-1).sqrt().clamp(max=FP16_MAX).half()
        vectors = padded(groups / divisor(scale).unsqueeze(-1), (0, -self.group % self.dim))
        flat = vectors.unflatten(-1, (-1, self.dim)).flatten(0, -2)
        found = torch.cat([self.nearest(part) for part in flat.split(AT_ONCE)])
        codes = found.view(*x.shape[:2], -1, len(self.code_bits)).unbind(-1)
        parts = [pack(part, bits) for part, bits in zip(codes, self.code_bits, strict=True)]
        return {**dict(zip(self._names, parts, strict=True)), "scale": scale}

    def decode(self, packed: Packed, out: Tensor) -> None:
        tokens, channels = out.shape[-2:]
        each = zip(self._names, self.code_bits, strict=True)
        codes = torch.stack([unpack(dense(packed, name), bits, tokens) for name, bits in each], -1)
        scale = dense(packed, "scale").float().unsqueeze(-1)
        vectors = self.points(codes.flatten(0, -2)).view(*scale.shape[:-1], -1)
        states = (vectors[..., : self.group] * scale).flatten(-2)[..., :channels]
        out.copy_(states.clamp_(-FP16_MAX, FP16_MAX))

    def fields(self, tokens: int, channels: int) -> dict[str, Field]:
        groups = -(-channels // self.group)
        vectors = groups * -(-self.group // self.dim)
        each = zip(self._names, self.code_bits, strict=True)
        codes = {
            name: Field((packed_rows(tokens, bits), vectors), torch.uint8, "codes") for name, bits in each
        }
        return {**codes, "scale": Field((tokens, groups), torch.float16, "ranges")}

    @property
    def _names(self) -> tuple[str, ...]:
        return ("codes", "signs")[: len(self.code_bits)]


@dataclass(frozen=True, eq=False)
class Pairs(Vectors):
    """Vectors of two channels: the ``4**bits`` points of least error for two normal numbers.

    Args:
        bits: a channel, 2 to 4.
    """

    bits: int
    dim = 2

    @property
    def code_bits(self) -> tuple[int, ...]:
        return (2 * self.bits,)

    @cached_property
    def _table(self) -> Tensor:
        """``[4**bits, 2]``."""
        return _pairs()[f"{self.bits} bits"]

    def nearest(self, x: Tensor) -> Tensor:
        table = self._table.to(x.device)
        score = x @ table.T - table.square().sum(-1) / 2
        return score.argmax(-1, keepdim=True).to(torch.uint8)

    def points(self, codes: Tensor) -> Tensor:
        return self._table.to(codes.device)[codes[:, 0].int()]


@cache
def _pairs() -> dict[str, Tensor]:
    """What `tools/pair_points.py` found."""
    return load_file(Path(__file__).with_name("pairs.safetensors"))


E8_SIZE = 0.97
"""What the halves of the lattice are multiplied with, so that normal numbers lose least."""


@dataclass(frozen=True, eq=False)
class E8(Vectors):
    """Vectors of eight channels: 65,536 points of the lattice E8, moved by a quarter (QuIP#, arXiv
    2402.04396, section 4.2). 8 bits of a code choose the magnitudes of a point, 7 the signs of the first
    channels, from which that of the last follows, and one whether the point is moved up or down.
    """

    dim = 8

    @property
    def code_bits(self) -> tuple[int, ...]:
        return 8, 8

    def nearest(self, x: Tensor) -> Tensor:
        magnitudes, odd = (t.to(x.device) for t in _magnitudes())
        norms = magnitudes.square().sum(-1)
        found = []
        for up in (0, 1):
            moved = x / E8_SIZE - (0.25 if up else -0.25)
            size = moved.abs()
            score = 2 * size @ magnitudes.T - norms
            # Where the signs of the numbers are not allowed, the one that matters least is turned.
            negative = moved < 0
            wrong = (negative.sum(-1, keepdim=True) % 2).bool() ^ odd
            least, at = (size.unsqueeze(1) * magnitudes).min(-1)
            score = score - 4 * least * wrong
            best = score.argmax(-1, keepdim=True)
            turned = torch.zeros_like(negative).scatter_(1, at.gather(1, best), wrong.gather(1, best))
            cost = moved.square().sum(-1) - score.gather(1, best)[:, 0]
            bits = (negative ^ turned)[:, :7].int() << torch.arange(7, device=x.device)
            found.append((cost, torch.stack([best[:, 0].int(), bits.sum(-1).int() | up << 7], -1)))
        (down, codes), (above, others) = found
        return torch.where((above < down)[:, None], others, codes).to(torch.uint8)

    def points(self, codes: Tensor) -> Tensor:
        magnitudes, odd = (t.to(codes.device) for t in _magnitudes())
        which, signs = codes.int().unbind(-1)
        negative = signs[:, None] >> torch.arange(7, device=codes.device) & 1
        last = (negative.sum(-1, keepdim=True) % 2) ^ odd[which][:, None].int()
        signed = magnitudes[which] * (1 - 2 * torch.cat([negative, last], -1))
        return (signed + ((signs >> 7) * 0.5 - 0.25)[:, None]) * E8_SIZE


@cache
def _magnitudes() -> tuple[Tensor, Tensor]:
    """Halves of odd numbers ``[256, 8]``: all whose squares sum up to 10 at most, and the first with 12. And
    for which an odd number of signs is negative, so that the sum of the numbers is even."""
    found = []
    for total in range(6):  # so many steps: 3/2 is one, 5/2 are three
        for fives in range(total // 3 + 1):
            threes = total - 3 * fives
            for high in combinations(range(8), fives):
                rest = [i for i in range(8) if i not in high]
                for middle in combinations(rest, threes):
                    found.append([2.5 if i in high else 1.5 if i in middle else 0.5 for i in range(8)])
    table = torch.tensor(found[:256], dtype=torch.float32, device="cpu")
    return table, table.sum(-1) % 2 == 1
