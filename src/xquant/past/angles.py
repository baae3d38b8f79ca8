"""The angles of an engine's rotary embedding, by which RoPE is removed from keys before they are packed."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import compat
from ..methods import LayerCodec
from ..models import AttentionView
from ..models.rope import Rope
from ..models.rotation import Pair, apply_rope, inverse


@dataclass
class Within:
    """``R(r)`` of the places of a block."""

    angles: Pair
    """cos and sin, fp32 ``[n, D/2]``, without the factor by which some embeddings scale what they rotate."""
    prepared: dict[str, Any] = field(default_factory=dict)
    """What backends have made of it."""


@dataclass(frozen=True)
class PagedAngles:
    """cos and sin of positions, fp32, for keys that are kept before RoPE."""

    within: Within
    """Of the places of a block."""
    starts: Pair
    """``[columns, D / 2]`` of the positions that blocks start at."""
    every: Pair
    """``[positions, D / 2]``."""

    def of_blocks(self, device: torch.device) -> list[Tensor]:
        """cos and sin of the starts of blocks, then of the places within, on ``device``."""
        return [t.to(device).contiguous() for t in (*self.starts, *self.within.angles)]


class Angles:
    """cos and sin of every position that a model allows.

    Args:
        cos, sin: ``[positions, R / 2]``, ``R`` the rotated channels of a head. They are applied to keys in
            the dtype of the model.
    """

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self._cos, self._sin = cos.float(), sin.float()
        self._blocks: dict[int, PagedAngles] = {}
        self._back: tuple[Tensor, Pair] | None = None

    @classmethod
    def of(cls, rope: Rope, count: int, device: torch.device) -> "Angles":
        """Of the first ``count`` positions.

        Raises:
            ValueError: RoPE has other frequencies for long inputs.
        """
        if rope.drifts or rope.switches:
            raise ValueError(
                "it keeps keys before RoPE, and the model's has other frequencies for long inputs"
            )
        positions = torch.arange(count, device=device)[None]
        cos, sin = rope(torch.empty(0, dtype=torch.float32, device=device), positions)
        half = cos.shape[-1] // 2
        return cls(cos[0, :, :half], sin[0, :, :half])

    def apply_rope(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Keys ``[T, G, D]`` at ``positions`` ``[T]``, rotated."""
        return apply_rope(keys[None], *self._at(positions, keys))[0]

    def remove_rope(self, blocks: Tensor, starts: Tensor) -> Tensor:
        """The inverse of `apply_rope`, in fp32: keys ``[m, n, G, D]`` of blocks that begin at ``starts``
        ``[m]``."""
        if self._back is None or self._back[0] is not starts:  # all layers have these blocks
            positions = (starts[:, None] + torch.arange(blocks.shape[1], device=starts.device)).flatten()
            cos, sin = self._at(positions, blocks)
            self._back = starts, inverse(cos.float(), sin.float())
        keys = blocks.flatten(0, 1)[None].float()
        return apply_rope(keys, *self._back[1])[0].view_as(blocks).to(blocks.dtype)

    def paged(self, block: int) -> PagedAngles:
        """As kernels take them that read pages of ``block`` tokens."""
        if block not in self._blocks:
            factor = self._cos[0, 0]  # some embeddings scale what they rotate: the start has that
            within = Within((self._cos[:block] / factor, self._sin[:block] / factor))
            starts = self._cos[::block].contiguous(), self._sin[::block].contiguous()
            self._blocks[block] = PagedAngles(within, starts, (self._cos, self._sin))
        return self._blocks[block]

    def _at(self, positions: Tensor, like: Tensor) -> Pair:
        cos, sin = (t[positions].to(like.dtype).repeat(1, 2)[None] for t in (self._cos, self._sin))
        return cos, sin


class RotatedStates:
    """Blocks of rotated keys beside values, to features of a codec and back: it may keep keys before RoPE.

    Args:
        angles: of the layer's rotary embedding; needed where the codec keeps keys before it.
    """

    def __init__(self, codec: LayerCodec, angles: Angles | None) -> None:
        assert codec.rotated or angles is not None
        self._codec, self._angles = codec, None if codec.rotated else angles

    def features(self, rows: Tensor, starts: Tensor) -> Tensor:
        """What the codec keeps of ``rows`` ``[m, n, W]`` of blocks that begin at positions ``starts``
        ``[m]``, in the same shape."""
        if self._angles is None:
            return rows
        view = self._codec.view
        key, value = rows.split(view.kv_width, -1)
        heads = key.unflatten(-1, (view.kv_heads, view.head_size))
        return torch.cat([self._angles.remove_rope(heads, starts).flatten(2), value], -1)

    def states(self, recalled: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values, ``[m n, G, D]``, of what the codec recalls of blocks, ``[1, m n, .]``."""
        view = self._codec.view
        keys, values = (
            part.reshape(-1, view.kv_heads, view.head_size) for part in self._codec.rebuild(recalled)
        )
        if self._angles is not None:
            within = torch.arange(len(keys) // len(starts), device=starts.device)
            keys = self._angles.apply_rope(keys, (starts[:, None] + within).flatten())
        return keys, values


def rotates_halves(view: AttentionView) -> bool:
    """Whether the attention of this layer, a module of transformers, applies RoPE as `Angles` does;
    True where it cannot be asked."""
    apply = compat.rotation(view.module)
    if apply is None:
        return True
    size = view.rotary_size  # some layers give the function these channels of a head alone
    key = torch.arange(1.0, 1 + size, dtype=torch.float32, device="cpu").view(1, 1, 1, size)  # [B, H, T, D]
    once = torch.arange(size // 2, device="cpu")[None, None].float()
    twice = once.repeat(1, 1, 2)
    ours = apply_rope(key.transpose(1, 2), twice.cos(), twice.sin()).transpose(1, 2)
    for angles in (twice, once):
        try:
            _, found = apply(key, key, angles.cos(), angles.sin())
        except RuntimeError:  # it takes each angle once, as gpt-oss does
            continue
        return torch.allclose(found, ours, rtol=1e-4)
    return False
