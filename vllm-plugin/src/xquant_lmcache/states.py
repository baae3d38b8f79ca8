"""The shapes in which LMCache gives the states of a chunk, as rows of tokens and back.

Letters: ``L`` layers, ``T`` tokens, ``G`` heads of keys and values of size ``D``; ``W = 2 G D``.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

APART, FUSED, BLOCKS = "apart", "fused", "vllm-cpu"
LAYOUTS = (APART, FUSED, BLOCKS)
BLOCK = 128
"""Tokens of a block of vLLM's CPU backend, in which keys are transposed."""


class Heads(NamedTuple):
    """Of a layer."""

    kv_heads: int
    head_size: int


def rows_of(states: Tensor, layout: str, heads: Heads) -> Tensor:
    """Keys beside values, ``[L, T, W]``, of the states of a chunk.

    Args:
        layout: ``apart`` is ``[2, L, T, G D]``. In ``[L, T, 2 G D]`` or ``[1, L, T, 2 G D]`` a token has
            of each head its key and its value in ``fused``; in ``vllm-cpu`` each block of 128 tokens has of
            each head its keys ``[D, 128]``, then its values ``[128, D]``.

    Raises:
        ValueError: states of another shape.
    """
    check(tuple(states.shape), layout, heads)
    if layout == APART:
        return torch.cat([states[0], states[1]], -1)
    whole = states.reshape(states.shape[-3:])
    parts = _SPLIT[layout](whole, heads)
    return torch.cat([part.reshape(*whole.shape[:2], -1) for part in parts], -1)


def write_rows(rows: Tensor, states: Tensor, layout: str, heads: Heads) -> None:
    """Write ``rows`` ``[L, T, W]`` to the states of a chunk, in the layout that `rows_of` reads."""
    check(tuple(states.shape), layout, heads)
    keys, values = rows.unflatten(-1, (2, *heads)).unbind(2)  # [L, T, G, D]
    if layout == APART:
        states[0], states[1] = keys.flatten(2), values.flatten(2)
        return
    whole = states.view(states.shape[-3:])
    to_keys, to_values = _SPLIT[layout](whole, heads)
    to_keys.copy_(keys.reshape(to_keys.shape))
    to_values.copy_(values.reshape(to_values.shape))


def check(shape: tuple[int, ...], layout: str, heads: Heads) -> int:
    """Refuse states of another shape than a layout's.

    Returns:
        ``T``.
    """
    width = heads.kv_heads * heads.head_size
    apart = layout == APART and len(shape) == 4 and shape[0] == 2 and shape[3] == width
    joined = layout != APART and len(shape) in (3, 4) and shape[-1] == 2 * width
    if not (apart or (joined and (len(shape) == 3 or shape[0] == 1))):
        raise ValueError(
            f"xquant: states {list(shape)} of a chunk are not '{layout}' of {heads.kv_heads} heads of"
            f" {heads.head_size}: 'layout' of the serde is one of {', '.join(LAYOUTS)}"
        )
    if layout == BLOCKS and shape[-2] % BLOCK:
        raise ValueError(f"xquant: chunks of {shape[-2]} tokens are no whole blocks of {BLOCK}")
    return shape[-2]


def _fused(whole: Tensor, heads: Heads) -> tuple[Tensor, Tensor]:
    """Views of keys and values ``[L, T, G, D]``."""
    keys, values = whole.unflatten(-1, (heads.kv_heads, 2, heads.head_size)).unbind(3)
    return keys, values


def _blocks(whole: Tensor, heads: Heads) -> tuple[Tensor, Tensor]:
    """Views of keys and values ``[L, T / 128, 128, G, D]``."""
    layers, tokens, _ = whole.shape
    each = whole.view(layers, tokens // BLOCK, heads.kv_heads, 2, BLOCK * heads.head_size)
    keys = each[..., 0, :].unflatten(-1, (heads.head_size, BLOCK)).permute(0, 1, 4, 2, 3)
    values = each[..., 1, :].unflatten(-1, (BLOCK, heads.head_size)).permute(0, 1, 3, 2, 4)
    return keys, values


_SPLIT: dict[str, Callable[[Tensor, Heads], tuple[Tensor, Tensor]]] = {FUSED: _fused, BLOCKS: _blocks}
