"""Blocks of tokens in classes, for tests of properties."""

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from xquant.quant.classes import Classed
from xquant.quant.ranked import Ranked, allot
from xquant.quant.steps import steps_of


@st.composite
def classed_blocks(draw: Any) -> tuple[Classed, Tensor, Tensor | None]:
    """A quantizer, blocks, and tokens that are left out."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    channels, tokens = draw(st.integers(1, 12)), draw(st.sampled_from([1, 3, 16, 40, 64]))
    count, blocks = draw(st.sampled_from([2, 4])), draw(st.integers(1, 3))
    size = 10 ** (2 * torch.rand(channels, generator=generator) - 1)
    x = torch.randn(blocks, tokens, channels, generator=generator) * size
    costs = torch.randn(channels, generator=generator) / size
    if draw(st.booleans()):
        x[..., 0] = (x[..., 0] / size[0]).round()  # many cost the same
        costs = torch.eye(channels)[0]
    usual = steps_of(size.square()).to(torch.int16)
    profile = size.square().sort(descending=True).values
    counts = allot([profile / 4**number for number in range(count)], draw(st.integers(0, 8 * channels)))
    excluded = torch.rand(blocks, tokens, generator=generator) < 0.1 if draw(st.booleans()) else None
    return Classed(tuple(Ranked(usual, each, costs=costs) for each in counts)), x, excluded
