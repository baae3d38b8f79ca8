"""Pages against a stream: the same bytes of a block, in other places."""

import pytest
import torch

from xquant.quant import Affine, Codebook, Packed, Plain, Segment
from xquant.quant.quantizer import dense
from xquant.store.pages import ALIGNMENT, PageLayout, Pages
from xquant.store.sealing import pack_rows
from xquant.store.stream import Stream

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
    stream = Stream(segments, BLOCK)
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
    Pages(layout, memory[:, : layout.nbytes]).write(numbers, rows)

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
    pages = Pages(layout, torch.zeros(9, layout.nbytes, dtype=torch.uint8))
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
        Pages(layout, memory).write(torch.tensor([0]), rows)
    assert not memory.any()


@pytest.mark.parametrize(
    ("segment", "why"),
    [
        (Segment(4, Affine(4, "token", 4), shared=True), "share codes"),
        (
            Segment(4, Codebook(2, "token", 0, torch.tensor([-1.0, 0, 0.5, 1]), share=0.1)),
            "outliers",
        ),
    ],
)
def test_blocks_without_bytes_of_their_own_have_no_page(segment: Segment, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        PageLayout([segment], BLOCK)
