"""Codes with a scale and no zero point, and codes with scales along both axes of a block."""

import math
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad as padded

from .affine import FP16_MAX, checked, divisor, quotient
from .codebook import nearest
from .grouped import Grouped
from .operand import Operand
from .pack import pack, packed_rows, unpack
from .quantizer import Field, Granularity, Packed, Quantizer, dense

Scale = Literal["peak", "norm", "signed peak"]


@dataclass(frozen=True, eq=False)
class Scaled(Grouped):
    """``x ~ level[code] * scale``, with an fp16 scale for every ``group`` channels of a token; the last may
    be of fewer.

    Args:
        levels: ``[2**bits]``, sorted, fp32.
        of: what a scale is. ``peak``: the largest magnitude over the largest level. ``signed peak``: the
            element of the largest magnitude over the lowest level, so that scales may be negative. With both,
            levels are whole numbers, one after the other. ``norm``: the root mean square; levels are
            multiples of it. What is stored is the root mean square times the largest level.
    """

    per: Granularity = field(default="token", init=False)
    levels: Tensor
    of: Scale

    def range_size(self, along: int) -> int:
        return self.group

    def encode(self, x: Tensor, excluded: Tensor | None) -> Packed:
        groups = self._groups(checked(x))
        scale = self._scale(groups).clamp(-FP16_MAX, FP16_MAX).half()
        codes = nearest(groups / divisor(scale).unsqueeze(-1), self._stored_levels(x.device))
        codes = self.pack(codes.flatten(-2)[..., : x.shape[-1]])
        return {"codes": codes, "scale": self._pack_range(scale)}

    def decode(self, packed: Packed, out: Tensor) -> None:
        tokens, channels = out.shape[-2:]
        codes = self.unpack(dense(packed, "codes"), tokens, channels).int()
        scale = self._unpack_range(packed, "scale", tokens).float()
        scale = scale.repeat_interleave(self.group, -1)[..., :channels]
        out.copy_((self._stored_levels(out.device)[codes] * scale).clamp(-FP16_MAX, FP16_MAX))

    def _stored_levels(self, device: torch.device) -> Tensor:
        """What is multiplied with stored scales, ``[2**bits]``."""
        levels = self.levels.to(device)
        return levels / levels[-1] if self.of == "norm" else levels

    def _groups(self, x: Tensor) -> Tensor:
        """``[N, n, C]`` as ``[N, n, groups, size]``, filled up with 0."""
        return padded(x, (0, -x.shape[-1] % self.group)).unflatten(-1, (-1, self.group))

    def _scale(self, groups: Tensor) -> Tensor:
        if self.of == "norm":
            return groups.square().mean(-1).sqrt() * self.levels[-1].item()
        peak = groups.abs().max(-1)
        if self.of == "peak":
            return quotient(peak.values, self.levels[-1].item())
        highest = groups.gather(-1, peak.indices[..., None])[..., 0]
        return quotient(highest, self.levels[0].item())

    def fields(self, tokens: int, channels: int) -> dict[str, Field]:
        found = super().fields(tokens, channels)
        del found["zero"]
        return found

    @property
    def _even(self) -> bool:
        """Whether levels are consecutive whole numbers, so that a level is the code plus a constant."""
        return self.of != "norm"

    @property
    def _zero_scales(self) -> float:
        return self.levels[0].item() if self._even else 0.0

    def operand(self, tokens: int, channels: int) -> Operand:
        levels = None if self._even else self._stored_levels(self.levels.device)
        found = super().operand(tokens, channels)
        return replace(found, levels=levels, zero_scales=self._zero_scales)

    def unpack_ranges(self, packed: Packed, tokens: int) -> tuple[Tensor, Tensor]:
        scale = self._unpack_range(packed, "scale", tokens)
        return scale, scale.float() * self._zero_scales


@dataclass(frozen=True, eq=False)
class Sketched(Quantizer):
    """What another quantizer leaves of each head, as the signs of a random projection of it and its length
    (QJL, arXiv 2406.03482): products with what is decoded are right on average.

    Args:
        base: of the same channels.
        projection: ``[size, size]``, normal numbers; ``size`` channels are projected at a time.
    """

    base: Quantizer
    projection: Tensor

    def encode(self, x: Tensor, excluded: Tensor | None) -> Packed:
        x = checked(x)
        packed = self.base.encode(x, excluded)
        coded = torch.empty_like(x)
        self.base.decode(packed, coded)
        rest = (x - coded).unflatten(-1, (-1, len(self.projection)))
        signs = (rest @ self.projection.to(x.device).T >= 0).flatten(-2).to(torch.uint8)
        length = rest.norm(dim=-1).clamp(max=FP16_MAX).half()
        return {**packed, "signs": pack(signs, 1), "length": length}

    def decode(self, packed: Packed, out: Tensor) -> None:
        size, tokens = len(self.projection), out.shape[-2]
        coded = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        self.base.decode(packed, coded)
        signs = unpack(dense(packed, "signs"), 1, tokens).float() * 2 - 1
        sketch = signs.unflatten(-1, (-1, size)) @ self.projection.to(out.device)
        scale = math.sqrt(math.pi / 2) / size * dense(packed, "length").float()
        coded += (sketch * scale.unsqueeze(-1)).flatten(-2)
        out.copy_(coded.clamp_(-FP16_MAX, FP16_MAX))

    def fields(self, tokens: int, channels: int) -> dict[str, Field]:
        signs = Field((packed_rows(tokens, 1), channels), torch.uint8, "codes")
        length = Field((tokens, channels // len(self.projection)), torch.float16, "ranges")
        return {**self.base.fields(tokens, channels), "signs": signs, "length": length}

    @property
    def tables(self) -> list[Tensor]:
        return [self.projection]

    def tiled(self, head: int, lanes: Literal["tokens", "channels"]) -> "Sketched":
        return replace(self, base=self.base.tiled(head, lanes))


@dataclass(frozen=True)
class Balanced(Grouped):
    """Affine codes of heads whose tokens and channels were given one variance (KVarN, arXiv 2606.03458): ``x
    ~ (code * scale + zero) * second``, with an fp16 scale and zero per token (or channel) of each head, and a
    second scale per channel (or token).

    Args:
        per: what a scale and a zero are of.
        group: channels of a head.
        rounds: of dividing by the deviation of each token and of each channel.
    """

    rounds: int

    def range_size(self, along: int) -> int:
        return self.group if self.per == "token" else along

    def encode(self, x: Tensor, excluded: Tensor | None) -> Packed:
        heads = checked(x).unflatten(-1, (-1, self.group))  # [N, n, G, D]
        seen = torch.ones_like(heads[..., :1])
        if excluded is not None:
            seen = seen * ~excluded[..., None, None]
        by_token, by_channel = torch.ones_like(heads[..., :1]), torch.ones_like(heads[:, :1])
        for _ in range(self.rounds):
            by_token = by_token * _deviation(heads / (by_token * by_channel), -1)
            by_channel = by_channel * _deviation(heads / (by_token * by_channel), 1, seen)
        # Codes are made with the scales as they are stored, rounded to fp16.
        by_token, by_channel = (t.clamp(_LEAST, FP16_MAX).half().float() for t in (by_token, by_channel))
        even = heads / (by_token * by_channel)
        dim, own = (-1, by_token) if self.per == "token" else (1, by_channel)
        hidden = seen == 0
        low = even.masked_fill(hidden, torch.inf).amin(dim, keepdim=True)
        high = even.masked_fill(hidden, -torch.inf).amax(dim, keepdim=True)
        low, high = (t.masked_fill(~t.isfinite(), 0) for t in (low, high))
        scale = ((high - low) / (2**self.bits - 1) * own).clamp(max=FP16_MAX).half()
        zero = (low * own).clamp(-FP16_MAX, FP16_MAX).half()
        codes = ((even * own - zero.float()) / divisor(scale)).round().clamp(0, 2**self.bits - 1)
        packed: Packed = {"codes": self.pack(codes.to(torch.uint8).flatten(-2))}
        packed |= self._pack_ranges(scale.flatten(2), zero.flatten(2))
        second = (by_channel if self.per == "token" else by_token).half()
        if self.per == "token":
            return {**packed, "second": second.flatten(1)}
        second = second.squeeze(-1)
        return {**packed, "second": second.mT.contiguous() if self.in_tiles(x.shape[1]) else second}

    def decode(self, packed: Packed, out: Tensor) -> None:
        tokens, channels = out.shape[-2:]
        groups = channels // self.group
        own = (-1, tokens, groups, 1) if self.per == "token" else (-1, 1, groups, self.group)
        codes = self.unpack(dense(packed, "codes"), tokens, channels).float()
        scale, zero = (t.float().reshape(own) for t in self.unpack_ranges(packed, tokens))
        rows = codes.unflatten(-1, (groups, self.group)) * scale + zero
        second = self.second(packed, tokens)
        rows *= second[:, None] if self.per == "token" else second.mT[..., None]
        out.copy_(rows.flatten(-2).clamp_(-FP16_MAX, FP16_MAX))

    def second(self, packed: Packed, tokens: int) -> Tensor:
        """The second scales, fp32: ``[N, G, D]`` of channels, or ``[N, G, n]`` of tokens."""
        stored = dense(packed, "second").float()
        if self.per == "token":
            return stored.unflatten(-1, (-1, self.group))
        return stored if self.in_tiles(tokens) else stored.mT

    def fields(self, tokens: int, channels: int) -> dict[str, Field]:
        groups = channels // self.group
        shape: tuple[int, ...] = (channels,)
        if self.per == "channel":
            shape = (groups, tokens) if self.in_tiles(tokens) else (tokens, groups)
        second = Field(shape, torch.float16, "ranges")
        return {**super().fields(tokens, channels), "second": second}

    def operand(self, tokens: int, channels: int) -> Operand:
        return replace(super().operand(tokens, channels), second=True)


_LEAST = 2.0**-14
"""The smallest scale. A token, or channel, with a smaller deviation is divided by this instead."""


def _deviation(x: Tensor, dim: int, seen: Tensor | None = None) -> Tensor:
    """The standard deviation along ``dim``, of what is ``seen``."""
    weight = torch.ones_like(x[..., :1]) if seen is None else seen
    weight = weight.expand_as(x)
    count = weight.sum(dim, keepdim=True).clamp(min=1)
    mean = (x * weight).sum(dim, keepdim=True) / count
    variance = ((x - mean).square() * weight).sum(dim, keepdim=True) / count
    deviation = variance.sqrt()
    return deviation.masked_fill(deviation < _LEAST, 1)
