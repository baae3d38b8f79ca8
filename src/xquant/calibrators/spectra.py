"""How the states of a layer vary within blocks: the scale of every channel, and the profile by which ranks
get their bits. Of all tokens, or of each class of them."""

import torch
from torch import Tensor

from ..quant.classes import by_cost
from ..quant.ranked import REST_STEPS
from ..quant.steps import FARTHEST_STEP, steps_of
from ..quant.trellis import CIRCLE, WIDTHS

SINKS = 4
"""First tokens of a sample that are left out: their keys and values are far from all others."""
BLOCK = 128
"""Tokens whose variance is taken at a time."""


def blocks(states: Tensor) -> tuple[Tensor, Tensor]:
    """States ``[N, T, C]`` cut into blocks ``[M, n, C]``, and which of their tokens are sinks, ``[M, n]``."""
    length = states.shape[1]
    size = min(BLOCK, length // CIRCLE * CIRCLE)
    whole = length // size * size
    sinks = (torch.arange(whole, device="cpu") < SINKS).expand(len(states), -1)
    return states[:, :whole].unflatten(1, (-1, size)).flatten(0, 1), sinks.reshape(-1, size)


def spectrum(states: Tensor, rests: int = 0) -> dict[str, Tensor]:
    """``usual`` and ``profile`` of states ``[N, T, C]``, and of the ``rests`` of the first of them."""
    return spectrum_of_blocks(*blocks(states), rests)


def spectrum_of_blocks(parts: Tensor, sinks: Tensor, rests: int = 0) -> dict[str, Tensor]:
    """`spectrum` of blocks ``[M, n, C]`` with ``sinks`` ``[M, n]``."""
    variance = torch.stack(
        [part[~hidden].square().mean(0) for part, hidden in zip(parts, sinks, strict=True)]
    )
    usual = steps_of(variance.mean(0))
    below = usual[:rests] - REST_STEPS
    variance = torch.cat([variance, variance[:, :rests] * WIDTHS[-1].error], 1)
    return {
        "usual": torch.cat([usual, below.clamp(min=-FARTHEST_STEP)]).to(torch.int16),
        "profile": variance.sort(-1, descending=True).values.mean(0).float(),
    }


def by_class(states: Tensor, dear: Tensor, due: Tensor, classes: int) -> dict[str, Tensor]:
    """``usual`` and ``profile`` of states ``[N, T, C]`` for each class of tokens, one after the other, the
    profiles times what an error costs in the class. ``dear`` ``[N, T]``: the logarithm of what an error of
    one unit is predicted to cost; what is ``due`` for it, ``[N', T]``, is known of the first ``N'`` samples.
    """
    parts, sinks = blocks(states)
    loud = loudness(states)
    order, due = dear + loud.clamp(min=1e-30).log(), due * loud[: len(due)]
    order, due, loud = (blocks(each[..., None])[0][..., 0] for each in (order, due, loud[: len(due)]))
    chosen = by_cost(order, sinks, classes)
    found = []
    for tokens in chosen:
        own = parts.gather(1, tokens[..., None].expand(-1, -1, parts.shape[2]))
        each = spectrum_of_blocks(own, sinks.gather(1, tokens))
        seen = ~sinks.gather(1, tokens)[: len(due)]
        costly, size = (t.gather(1, tokens[: len(due)])[seen].mean() for t in (due, loud))
        found.append((each["usual"], each["profile"] * (costly / size.clamp(min=1e-30))))
    usual, profile = map(torch.cat, zip(*found, strict=True))
    return {"usual": usual, "profile": profile}


def loudness(states: Tensor) -> Tensor:
    """The mean over the channels of states ``[N, T, C]`` of their squares over their variance, ``[N, T]``:
    the error of a token grows with it."""
    variance = states[:, SINKS:].flatten(0, 1).square().mean(0).clamp(min=1e-30)
    return (states.square() / variance).mean(-1)
