"""Stream against a plain list of rows, under random sequences of operations."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xquant.quant import Affine, Plain, Segment
from xquant.stream import Stream

BLOCK, CHANNELS = 6, 5
LAYOUT = (
    Segment(1, Plain(torch.float16)),
    Segment(2, Affine(3, "channel", 6)),
    Segment(2, Affine(2, "token", 2)),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("seal"), st.integers(1, 3)),
        st.tuples(st.just("crop"), st.integers(0, 15)),
        st.tuples(st.just("select"), st.lists(st.integers(0, 9), min_size=1, max_size=4)),
    ),
    max_size=8,
)


@settings(max_examples=100, deadline=None)
@given(STEPS, st.integers(0, 2**32 - 1))
def test_a_stream_reads_what_was_sealed_whatever_happened_since(steps: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    stream = Stream(LAYOUT, BLOCK)
    rows = torch.empty(2, 0, CHANNELS)
    for step, argument in steps:
        if step == "seal":
            blocks = torch.randn(len(rows), argument, BLOCK, CHANNELS, generator=generator)
            rows = torch.cat([rows, stream.roundtrip(blocks.flatten(1, 2))], 1)
            stream.seal(blocks)
        elif step == "crop":
            rows = rows[:, : max(rows.shape[1] - argument, 0)]
            stream.crop(rows.shape[1])
        else:
            indices = torch.tensor([i % len(rows) for i in argument])
            rows = rows[indices]
            stream.select(indices)
        tokens = rows.shape[1]
        assert stream.tokens == tokens
        assert stream.nbytes == stream.blocks * stream.block_nbytes()
        assert stream.blocks <= len(rows) * len(stream.lengths)
        for wanted in {tokens, tokens // 2} - {0}:
            assert torch.equal(stream.read(torch.float32, wanted), rows[:, :wanted])


def test_copies_of_a_sequence_share_blocks_and_lost_blocks_are_dropped() -> None:
    stream = Stream(LAYOUT, BLOCK)
    stream.seal(torch.randn(2, 3, BLOCK, CHANNELS))
    stream.select(torch.tensor([0, 0, 1, 0]))
    assert stream.blocks == 6
    stream.select(torch.tensor([0, 1]))
    assert stream.blocks == 3
    stream.seal(torch.randn(2, 1, BLOCK, CHANNELS))
    assert stream.blocks == 5
