"""The shapes in which LMCache gives the states of a chunk, as rows of tokens and back.

Letters: ``L`` layers, ``T`` tokens, ``G`` heads of keys and values of size ``D``; ``W = 2 G D``.
"""

import platform
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

APART, FUSED, BLOCKS = "apart", "fused", "vllm-cpu"
LAYOUTS = (APART, FUSED, BLOCKS)
BLOCK = 128
"""Tokens of a block of vLLM's CPU backend by default, in which keys are transposed."""


class Heads(NamedTuple):
    """Of a layer."""

    kv_heads: int
    head_size: int


def layout_of(shape: tuple[int, ...]) -> str:
    """The layout of states of this shape, which vLLM has where it runs as this process does: `APART` is seen;
    of the others, one is that of its backend for CPUs."""
    if len(shape) == 4 and shape[0] == 2:
        return APART
    return FUSED if torch.cuda.is_available() else BLOCKS


def rows_of(states: Tensor, layout: str, heads: Heads) -> Tensor:
    """Keys beside values, ``[L, T, W]``, of the states of a chunk.

    Args:
        layout: ``apart`` is ``[2, L, T, G D]``. In ``[L, T, 2 G D]`` or ``[1, L, T, 2 G D]`` a token has
            of each head its key and its value in ``fused``. In ``vllm-cpu`` each 128 tokens are a block, in
            which the rows ``[128, 2 D]`` of a head are the memory of its keys ``[D, 128]`` and then of its
            values ``[128, D]``.

    Raises:
        ValueError: states of another shape, or a layout that is not known for this CPU.
    """
    check(tuple(states.shape), states.dtype, layout, heads)
    if layout == APART:
        return torch.cat([states[0], states[1]], -1)
    keys, values = _SPLIT[layout](_memory(states, layout, heads).contiguous())
    return torch.cat([keys.flatten(-2).flatten(1, -2), values.flatten(-2).flatten(1, -2)], -1)


def write_rows(rows: Tensor, states: Tensor, layout: str, heads: Heads) -> None:
    """Write ``rows`` ``[L, T, W]`` to the states of a chunk, in the layout that `rows_of` reads."""
    check(tuple(states.shape), states.dtype, layout, heads)
    keys, values = rows.unflatten(-1, (2, *heads)).unbind(2)  # [L, T, G, D]
    if layout == APART:
        states[0], states[1] = keys.flatten(2), values.flatten(2)
        return
    memory = _memory(states, layout, heads)
    made = torch.empty(memory.shape, dtype=states.dtype, device="cpu")
    to_keys, to_values = _SPLIT[layout](made)
    to_keys.copy_(keys.reshape(to_keys.shape))
    to_values.copy_(values.reshape(to_values.shape))
    memory.copy_(made)


def check(shape: tuple[int, ...], dtype: torch.dtype, layout: str, heads: Heads) -> int:
    """Refuse states of another shape than a layout's, and a layout that is not known here.

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
    if layout == BLOCKS and not _known_here(dtype):
        raise ValueError(f"xquant: how vLLM keeps {dtype} states on this kind of CPU is not known")
    return shape[-2]


def _known_here(dtype: torch.dtype) -> bool:
    """Whether vLLM's kernels for vectors of x86 write states of this type. With AMX, those of bfloat16 lie
    in its tiles; other architectures were not tried."""
    of_tiles = dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    return platform.machine().lower() in ("x86_64", "amd64") and not of_tiles


def _memory(states: Tensor, layout: str, heads: Heads) -> Tensor:
    """States in the order of `_fused` or of `_blocks`, a view."""
    whole = states.view(states.shape[-3:]).unflatten(-1, (heads.kv_heads, 2 * heads.head_size))
    return whole if layout == FUSED else whole.unflatten(1, (-1, BLOCK)).transpose(2, 3)


def _fused(memory: Tensor) -> tuple[Tensor, Tensor]:
    """Views of keys and values ``[L, T, G, D]`` of ``[L, T, G, 2 D]``."""
    keys, values = memory.chunk(2, -1)
    return keys, values


def _blocks(memory: Tensor) -> tuple[Tensor, Tensor]:
    """Views of keys and values ``[L, T / 128, 128, G, D]`` of ``[L, T / 128, G, 128, 2 D]``."""
    head_size = memory.shape[-1] // 2
    keys, values = memory.flatten(-2).chunk(2, -1)
    keys, values = keys.unflatten(-1, (head_size, BLOCK)), values.unflatten(-1, (BLOCK, head_size))
    return keys.permute(0, 1, 4, 2, 3), values.permute(0, 1, 3, 2, 4)


_SPLIT: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {FUSED: _fused, BLOCKS: _blocks}
