"""Pages against a stream: the same bytes of a block, in other places."""

import pytest
import torch

from xquant.past.packer import TORCH
from xquant.past.pages import ALIGNMENT, PageLayout, Pages
from xquant.past.sealing import pack_rows
from xquant.past.stream import Stream
from xquant.quant import Affine, Codebook, Packed, Plain, Segment
from xquant.quant.quantizer import dense

BLOCK, HEAD = 32, 32
LAYOUTS = {
    "plain": (Segment(64, Plain(torch.float32)),),
    "kivi": (
        Segment(64, Affine(4, "channel", BLOCK).tiled(HEAD, "tokens")),
        Segment(64, Affine(4, "token", BLOCK).tiled(HEAD, "channels")),
    ),
    "odd": (
        Segment(3, Plain(torch.float16)),
        Segment(5, Affine(3, "channel", 7)),
        Segment(9, Affine(2, "token", 4)),
    ),
}


@pytest.fixture(params=LAYOUTS)
def segments(request: pytest.FixtureRequest) -> tuple[Segment, ...]:
    return LAYOUTS[request.param]


def _stream(segments: tuple[Segment, ...], rows: torch.Tensor) -> tuple[Stream, list[Packed]]:
    stream = Stream(segments, BLOCK, TORCH)
    packed = pack_rows([stream], [rows], None)[0]
    stream.seal(packed, 1)
    return stream, packed


def _rows(segments: tuple[Segment, ...], blocks: int) -> torch.Tensor:
    return torch.randn(blocks, BLOCK, sum(segment.channels for segment in segments))


@pytest.mark.parametrize("beside", [0, 3 * ALIGNMENT])
def test_a_page_has_the_bytes_of_a_block(segments: tuple[Segment, ...], beside: int) -> None:
    torch.manual_seed(0)
    layout, rows = PageLayout(segments, BLOCK), _rows(segments, 3)
    memory = torch.full((7, layout.nbytes + beside), 171, dtype=torch.uint8)
    numbers = torch.tensor([5, 0, 2])
    Pages(layout, memory[:, : layout.nbytes], TORCH).write(numbers, rows)

    stream, packed = _stream(segments, rows)
    filled = torch.zeros_like(memory, dtype=torch.bool)
    for place in layout.places:
        stop = place.start + place.field.nbytes
        assert place.start % ALIGNMENT == 0
        block = dense(packed[place.segment], place.name).flatten(1).contiguous().view(torch.uint8)
        assert torch.equal(memory[numbers, place.start : stop], block)
        filled[numbers, place.start : stop] = True
    assert (memory[~filled] == 171).all()
    assert filled.sum() == stream.nbytes == 3 * layout.packed_nbytes


def test_pages_read_what_a_stream_reads(segments: tuple[Segment, ...]) -> None:
    torch.manual_seed(1)
    layout, rows = PageLayout(segments, BLOCK), _rows(segments, 4)
    pages = Pages(layout, torch.zeros(9, layout.nbytes, dtype=torch.uint8), TORCH)
    numbers = torch.tensor([8, 3, 4, 1])
    pages.write(numbers, rows)
    stream, _ = _stream(segments, rows)
    expected = stream.read(torch.float32, 4 * BLOCK).view_as(rows)
    assert torch.equal(pages.read(numbers, torch.float32), expected)
    assert torch.equal(pages.read(numbers[[2, 0]], torch.float32), expected[[2, 0]])


def test_nan_leaves_pages_as_they_were() -> None:
    segments = LAYOUTS["kivi"]
    layout, rows = PageLayout(segments, BLOCK), _rows(segments, 1)
    memory = torch.zeros(1, layout.nbytes, dtype=torch.uint8)
    rows[0, 3, -1] = torch.nan  # in the second segment
    with pytest.raises(ValueError, match="NaN"):
        Pages(layout, memory, TORCH).write(torch.tensor([0]), rows)
    assert not memory.any()


def test_blocks_without_bytes_of_their_own_have_no_page() -> None:
    with pytest.raises(ValueError, match="share codes"):
        PageLayout([Segment(4, Affine(4, "token", 4), shared=True)], BLOCK)


LEVELS = torch.tensor([-1.0, -0.3, 0.5, 1])
SPARSE = (
    Segment(64, Codebook(2, "channel", 0, LEVELS, share=0.05)),
    Segment(64, Codebook(2, "token", 0, LEVELS, share=0.05)),
)


def test_outliers_have_a_room() -> None:
    torch.manual_seed(2)
    layout, rows = PageLayout(SPARSE, BLOCK), _rows(SPARSE, 3)
    pages = Pages(layout, torch.full((5, layout.nbytes), 99, dtype=torch.uint8), TORCH)
    numbers = torch.tensor([4, 0, 2])
    pages.write(numbers, rows)
    stream, _ = _stream(SPARSE, rows)
    expected = stream.read(torch.float32, 3 * BLOCK).view_as(rows)
    assert pages.dropped == 0
    assert torch.equal(pages.read(numbers, torch.float32), expected)


def test_outliers_beyond_it_are_left_to_their_codes() -> None:
    torch.manual_seed(3)
    # Most are outside, where a tenth was expected.
    narrow = torch.full((1,), -0.2), torch.full((1,), 0.2)
    segments = (Segment(64, Codebook(2, "token", 0, LEVELS, share=0.1, threshold=narrow)),)
    layout, rows = PageLayout(segments, BLOCK), _rows(segments, 2)
    memory = torch.zeros(2, layout.nbytes, dtype=torch.uint8)
    pages, numbers = Pages(layout, memory, TORCH), torch.tensor([0, 1])
    pages.write(numbers, rows)
    stream, packed = _stream(segments, rows)
    whole = stream.read(torch.float32, 2 * BLOCK).view_as(rows)
    changed = (pages.read(numbers, torch.float32) - whole).abs()
    outside = int(dense(packed[0], "outlier_count").sum())
    kept = layout.fields(memory)[0]["outlier_excess"]
    assert isinstance(kept, torch.Tensor)
    assert 0 < pages.dropped == outside - kept.numel()
    assert 0 < (changed > 0).sum() <= pages.dropped
    for block in range(2):  # those that the codes miss by most are kept
        assert changed[block].max() <= kept[block].abs().min() * 1.001
