"""Stream against a plain list of rows, under random sequences of operations."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.block_sizes import block_nbytes
from support.examples import examples
from xquant.kernels.cpu import best
from xquant.past.packer import TORCH, Packer
from xquant.past.sealing import pack_rows
from xquant.past.slabs import Slabs
from xquant.past.stream import Stream
from xquant.quant import Affine, Codebook, Plain, Ragged, Segment
from xquant.quant.quantizer import OUTLIER_NBYTES, dense

BLOCK, CHANNELS = 6, 9
LAYOUT = (
    Segment(1, Plain(torch.float16)),
    Segment(2, Affine(3, "channel", 6)),
    Segment(2, Affine(2, "token", 2)),
    Segment(4, Codebook(2, "token", 0, torch.tensor([-1.0, -0.2, 0.3, 1.0]), share=0.1)),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("seal"), st.integers(1, 3)),
        st.tuples(st.just("crop"), st.integers(0, 15)),
        st.tuples(st.just("select"), st.lists(st.integers(0, 9), min_size=1, max_size=4)),
    ),
    max_size=8,
)


@settings(max_examples=examples(100), deadline=None)
@given(STEPS, st.integers(0, 2**32 - 1))
def test_a_stream_reads_what_was_sealed_whatever_happened_since(steps: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    stream = Stream(LAYOUT, BLOCK, TORCH)
    rows = torch.empty(2, 0, CHANNELS)
    for step, argument in steps:
        if step == "seal":
            blocks = torch.randn(len(rows), argument, BLOCK, CHANNELS, generator=generator)
            packed = pack_rows([stream], [blocks.flatten(0, 1)], None)[0]
            read = stream.unpack(packed, BLOCK, torch.float32).unflatten(0, blocks.shape[:2])
            rows = torch.cat([rows, read.flatten(1, 2)], 1)
            stream.seal(packed, len(blocks))
        elif step == "crop":
            rows = rows[:, : max(rows.shape[1] - argument, 0)]
            stream.crop(rows.shape[1])
        else:
            indices = torch.tensor([i % len(rows) for i in argument])
            rows = rows[indices]
            stream.select(indices)
        tokens = rows.shape[1]
        assert stream.tokens == tokens
        outliers = OUTLIER_NBYTES * stream.outliers
        assert stream.nbytes == stream.blocks * block_nbytes(stream) + outliers
        assert stream.blocks <= len(rows) * len(stream.lengths)
        for wanted in {tokens, tokens // 2} - {0}:
            assert torch.equal(stream.read(torch.float32, wanted), rows[:, :wanted])


def seal(stream: Stream, blocks: torch.Tensor) -> None:
    stream.seal(pack_rows([stream], [blocks.flatten(0, 1)], None)[0], len(blocks))


def test_copies_of_a_sequence_share_blocks_and_lost_blocks_are_dropped() -> None:
    stream = Stream(LAYOUT, BLOCK, TORCH)
    seal(stream, torch.randn(2, 3, BLOCK, CHANNELS))
    stream.select(torch.tensor([0, 0, 1, 0]))
    assert stream.blocks == 6
    stream.select(torch.tensor([0, 1]))
    assert stream.blocks == 3
    seal(stream, torch.randn(2, 1, BLOCK, CHANNELS))
    assert stream.blocks == 5


def test_growing_does_not_touch_the_outliers_that_are_there() -> None:
    stream = Stream(LAYOUT, BLOCK, TORCH)
    seal(stream, torch.randn(1, 3, BLOCK, CHANNELS))
    before = stream.pool[3]["outlier_excess"]
    assert isinstance(before, Ragged) and before.nbytes
    seal(stream, torch.randn(1, 2, BLOCK, CHANNELS))
    after = stream.pool[3]["outlier_excess"]
    assert isinstance(after, Ragged) and len(after) == 5
    assert all(old is new for old, new in zip(before.blocks, after.blocks, strict=False))
    assert all(run.untyped_storage().nbytes() == run.nbytes for run in after.blocks)


def test_shared_codes_follow_their_source_layer_through_every_change() -> None:
    source = Stream((Segment(3, Affine(2, "channel", BLOCK)),), BLOCK, TORCH)
    sharer = Stream((Segment(3, Affine(2, "channel", BLOCK), shared=True),), BLOCK, TORCH)
    sharer.source = source
    blocks = torch.randn(2, 3, BLOCK, 3)
    lent = pack_rows([source], [blocks.flatten(0, 1)], None)[0]
    own = pack_rows([sharer], [blocks.flatten(0, 1) * 2 + 1], None)[0]
    whole = sharer.unpack(own, BLOCK, torch.float32).unflatten(0, (2, 3)).flatten(1, 2)
    for fields in own:
        del fields["codes"]
    source.seal(lent, 2)
    sharer.seal(own, 2)
    assert torch.equal(sharer.read(torch.float32, 18), whole)
    for stream in (source, sharer):
        stream.crop(14)
        stream.select(torch.tensor([1, 1]))
    assert torch.equal(sharer.read(torch.float32, 14), whole[[1, 1], :14])
    assert sharer.nbytes == sharer.blocks * block_nbytes(sharer) == 3 * 3 * (2 + 2)
    assert source.nbytes == sharer.nbytes + 3 * 3 * 2


def test_a_restored_stream_holds_what_it_held_and_grows_from_there() -> None:
    stream = Stream(LAYOUT, BLOCK, TORCH)
    seal(stream, torch.randn(2, 2, BLOCK, CHANNELS))
    state, before, nbytes = stream.snapshot(), stream.read(torch.float32, 12), stream.nbytes
    seal(stream, torch.randn(2, 3, BLOCK, CHANNELS) * 9)
    stream.restore(state)
    assert stream.nbytes == nbytes
    assert torch.equal(stream.read(torch.float32, 12), before)
    blocks = torch.randn(2, 1, BLOCK, CHANNELS)
    alone = Stream(LAYOUT, BLOCK, TORCH)
    for one in (stream, alone):
        seal(one, blocks)
    assert torch.equal(stream.read(torch.float32, 18)[:, :12], before)
    assert torch.equal(stream.read(torch.float32, 18)[:, 12:], alone.read(torch.float32, 6))


def test_slabs_that_are_cut_off_are_dropped() -> None:
    for count, left in ((3, 1), (2, 1), (4, 2)):
        slabs = Slabs(torch.arange(6).view(3, 2))
        slabs.append(torch.arange(6, 16).view(5, 2))
        slabs.cut(count)
        assert len(slabs) == count and len(slabs.slabs) == left
        assert torch.equal(slabs.whole(), torch.arange(2 * count).view(count, 2))


def test_blocks_are_read_across_slabs_and_copied_only_where_they_must_be() -> None:
    slabs = Slabs(torch.arange(6).view(3, 2))
    slabs.append(torch.arange(6, 16).view(5, 2))
    every = torch.arange(16).view(8, 2)
    for ids in ([4, 5, 6], [1, 2, 3, 4], [7, 0, 3, 3], []):
        chosen = torch.tensor(ids, dtype=torch.long)
        assert torch.equal(slabs.read(chosen), every[chosen])
    assert slabs.read(torch.tensor([4, 5])).data_ptr() == slabs.slabs[1][1].data_ptr()


@pytest.mark.parametrize("packer", [TORCH, best().packer])
def test_what_a_segment_tells_of_the_next_is_taken_from_it_as_it_is_read(packer: Packer) -> None:
    """So errors of the first do not add up with those of the second."""
    generator = torch.Generator().manual_seed(0)
    predictor = torch.randn(5, 4, generator=generator)
    known = torch.randn(3, 16, 4, generator=generator)
    rows = torch.cat([known, known @ predictor.T + 0.1 * torch.randn(3, 16, 5, generator=generator)], -1)
    segments = (
        Segment(4, Affine(2, "channel", 16)),
        Segment(5, Affine(4, "channel", 16), predictor=predictor),
    )
    stream = Stream(segments, 16, packer)
    packed = packer.pack_segments(segments, rows, None)
    first, rest = stream.unpack(packed, 16, torch.float32).split([4, 5], -1)
    error = (rest + first @ predictor.T - rows[..., 4:]).norm()
    assert error < 0.2 * ((first - known) @ predictor.T).norm()
    for number in range(3):
        alone = packer.pack_segments(segments, rows[number : number + 1], None)
        for own, together in zip(alone, packed, strict=True):
            assert all(torch.equal(dense(own, k)[0], dense(together, k)[number]) for k in own)
