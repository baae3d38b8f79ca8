"""What quantizers say of their bytes, against what they pack."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.examples import examples
from support.ranked_counts import counts_of
from xquant.quant import Affine, Codebook, Packed, Plain, Quantizer, Ragged, Segment
from xquant.quant.codebook import outlier_count, uniform_levels
from xquant.quant.pack import Tile
from xquant.quant.quantizer import OUTLIER_NBYTES, Field
from xquant.quant.ranked import Ranked

BOUNDS = torch.tensor(-1.0), torch.tensor(1.0)
COUNTS = counts_of({0.5: 1, 3: 2, 8: 1})


def spans(channels: int) -> tuple[torch.Tensor, torch.Tensor]:
    return -torch.ones(channels), torch.ones(channels)


@st.composite
def cases(draw: Any) -> tuple[Quantizer, int, int]:
    """A quantizer and the tokens and channels of a block; as often as not one that fits tiles."""
    tiled = draw(st.booleans())
    tokens = draw(st.integers(1, 3)) * 32 if tiled else draw(st.integers(1, 40))
    channels = draw(st.integers(1, 3)) * 32 if tiled else draw(st.integers(4, 40))
    per, bits = draw(st.sampled_from(["token", "channel"])), draw(st.integers(1, 8))
    group = draw(st.sampled_from([0, 5, 16, 32]))
    kind = draw(st.sampled_from(["plain", "affine", "levels", "sparse", "offline", "ranked"]))
    if kind == "plain":
        found: Quantizer = Plain(draw(st.sampled_from([torch.float16, torch.float32])))
    elif kind == "affine":
        found = Affine(bits, per, group)
    elif kind == "ranked":
        found = Ranked(torch.zeros(channels, dtype=torch.int16), COUNTS)
    else:
        more: dict[str, Any] = {
            "levels": {},
            "sparse": draw(st.sampled_from([{"share": 0.1}, {"threshold": BOUNDS}])),
            "offline": {"span": spans(channels), "threshold": BOUNDS},
        }[kind]
        found = Codebook(bits, per, 0, uniform_levels(bits), **more)
    if tiled:
        found = found.tiled(32, draw(st.sampled_from(["tokens", "channels"])))
    return found, tokens, channels


@settings(max_examples=examples(200), deadline=None)
@given(cases(), st.integers(1, 3))
def test_fields_are_those_that_are_packed(case: tuple[Quantizer, int, int], blocks: int) -> None:
    quantizer, tokens, channels = case
    packed = quantizer.encode(torch.randn(blocks, tokens, channels), None)
    fields = quantizer.fields(tokens, channels)
    outliers = {name for name, held in packed.items() if isinstance(held, Ragged)}
    assert outliers == ({"outlier_excess", "outlier_channel"} if quantizer.sparse else set())
    assert list(fields) == [name for name in packed if name not in outliers]
    for name, field in fields.items():
        held, made = packed[name], field.empty(blocks)
        assert isinstance(held, torch.Tensor)
        assert (held.shape, held.dtype) == (made.shape, made.dtype)
        assert blocks * field.nbytes == held.nbytes
    parts = Segment(channels, quantizer).parts(tokens)
    apart = packed["outlier_channel"].flat().numel() if outliers else 0
    total = sum(held.nbytes for held in packed.values())
    assert total == blocks * parts.total() + OUTLIER_NBYTES * apart


@pytest.mark.parametrize(
    ("quantizer", "parts"),
    [
        (Plain(torch.float16), {"codes": 12 * 8 * 2}),
        (Affine(3, "token", 4), {"codes": (3 + 2) * 8, "ranges": 12 * 2 * 4}),
        (Affine(1, "channel", 0), {"codes": 2 * 8, "ranges": 8 * 4}),
        (
            Codebook(2, "token", 0, uniform_levels(2), share=0.1),
            {"codes": 3 * 8, "ranges": 12 * 4, "outliers": 12},
        ),
        (
            Codebook(2, "channel", 0, uniform_levels(2), threshold=BOUNDS, span=spans(8)),
            {"codes": 3 * 8, "outliers": 12},
        ),
    ],
)
def test_parts_of_a_block_of_twelve_tokens_and_eight_channels(
    quantizer: Quantizer, parts: dict[str, int]
) -> None:
    assert +Segment(8, quantizer).parts(12) == parts


def test_parts_of_a_block_of_ranked_codes() -> None:
    segment = Segment(8, Ranked(torch.zeros(8, dtype=torch.int16), COUNTS))
    parts = {"codes": 1 + 2 * 6 + 16, "ranges": 4 + 8}
    assert +segment.parts(16) == +segment.parts(12) == parts


def test_segments_of_shared_codes_store_the_rest() -> None:
    alone, sharing = (Segment(8, Affine(2, "token", 0), shared) for shared in (False, True))
    assert list(alone.fields(12)) == ["codes", "scale", "zero"]
    assert list(sharing.fields(12)) == ["scale", "zero"]
    assert sharing.parts(12) == {"ranges": 12 * 4}
    assert alone.parts(12).total() - sharing.parts(12).total() == 3 * 8


def test_a_block_that_is_not_whole_tiles_across_is_refused() -> None:
    quantizer = Affine(2, "token", 0, tile=Tile(32, "tokens"))
    with pytest.raises(ValueError, match="48 channels are not whole tiles of 32"):
        quantizer.fields(32, 48)
    assert quantizer.fields(12, 48)["codes"].shape == (3, 48)  # no tiles, so in rows


def test_outliers_are_expected_where_there_are_some() -> None:
    def expected(per: Any, **more: Any) -> float:
        found = Segment(50, Codebook(2, per, 0, uniform_levels(2), **more))
        assert found.quantizer.sparse == bool(more)
        return found.expected_outliers(blocks=3, tokens=40, seen=117)

    assert expected("token") == expected("channel") == 0
    assert expected("token", share=0.1) == 117 * outlier_count(0.1, 50) == 117 * 5
    assert expected("channel", share=0.1) == 3 * 50 * outlier_count(0.1, 40) == 3 * 50 * 4
    assert expected("token", share=0.1, threshold=BOUNDS) == 0.1 * 117 * 50


def test_a_new_quantizer_says_what_it_packs_and_no_more() -> None:
    class Signs(Quantizer):
        def encode(self, x: torch.Tensor, excluded: torch.Tensor | None) -> Packed:
            return {"sign": x > 0}

        def decode(self, packed: Packed, out: torch.Tensor) -> None:
            pass

        def fields(self, tokens: int, channels: int) -> dict[str, Field]:
            return {"sign": Field((tokens, channels), torch.bool, "codes")}

    signs = Signs()
    assert Segment(4, signs).parts(3) == {"codes": 12}
    assert (signs.sparse, signs.channels, signs.tables, signs.table_nbytes) == (False, None, [], 0)
    assert signs.expected_outliers(1, 3, 4, 3) == 0
    assert signs.tiled(32, "tokens") is signs
