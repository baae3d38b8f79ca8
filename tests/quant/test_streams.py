"""Streams: taken apart and put together again, every byte is what it was."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xquant.quant import Streams
from xquant.quant.pack import pack
from xquant.quant.streams import RunStreams

widths = st.lists(st.integers(1, 8), max_size=8, unique=True).map(lambda w: sorted(w, reverse=True))


@given(
    widths=widths,
    tokens=st.integers(1, 5).map(lambda n: 8 * n),
    blocks=st.integers(1, 3),
    data=st.data(),
)
def test_runs_of_codes(widths: list[int], tokens: int, blocks: int, data: st.DataObject) -> None:
    runs = tuple((bits, tokens * (1 + bits % 2), data.draw(st.integers(1, 5))) for bits in widths)
    codes = [torch.randint(0, 2**bits, (blocks, count, n)).byte() for bits, count, n in runs]
    packed = [pack(part, bits).flatten(1) for part, (bits, *_) in zip(codes, runs, strict=True)]
    field = torch.cat([torch.empty(blocks, 0, dtype=torch.uint8), *packed], 1)
    streams = RunStreams(runs)
    joined = torch.cat([torch.empty(0, dtype=torch.uint8), *streams.apart(field)])
    back = streams.together(joined, torch.uint8, field.shape)
    assert torch.equal(back, field)
    with pytest.raises(ValueError, match="bytes where"):
        streams.together(torch.cat([joined, joined.new_zeros(1)]), torch.uint8, field.shape)


@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int16, torch.uint8]),
    shape=st.lists(st.integers(0, 5), max_size=3),
)
def test_numbers(dtype: torch.dtype, shape: list[int]) -> None:
    tensor = (torch.randn(shape) * 100).to(dtype)
    joined = torch.cat(Streams().apart(tensor))
    assert torch.equal(Streams().together(joined, dtype, shape), tensor)
    with pytest.raises(ValueError, match="bytes where"):
        Streams().together(torch.cat([joined, joined.new_zeros(1)]), dtype, shape)
