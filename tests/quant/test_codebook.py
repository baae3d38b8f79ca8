"""Levels, outliers and their storage against small independent computations."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.examples import examples
from support.ranked_counts import counts_of
from xquant.quant import Affine, Codebook, Ragged, Segment
from xquant.quant.codebook import (
    inner_range,
    nearest,
    normal_float_levels,
    outlier_count,
    uniform_levels,
)
from xquant.quant.levels import edges_of
from xquant.quant.quantizer import OUTLIER_NBYTES, dense
from xquant.quant.ranked import Ranked

# The table that QLoRA prints (arXiv 2305.14314, appendix E).
NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
]  # fmt: skip
LEVELS = torch.tensor([-0.9, -0.25, 0.125, 1.0])


@st.composite
def blocks(draw: Any) -> torch.Tensor:
    shape = draw(st.tuples(st.integers(1, 3), st.integers(1, 12), st.integers(1, 12)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    x = torch.randn(shape, generator=generator)
    return x * 10.0 ** draw(st.integers(-2, 2)) + draw(st.sampled_from([0.0, 5.0]))


def test_normal_float_levels_are_those_of_qlora() -> None:
    torch.testing.assert_close(normal_float_levels(4), torch.tensor(NF4), atol=2e-7, rtol=0)
    for bits in range(2, 9):
        levels = normal_float_levels(bits)
        assert len(levels.unique()) == 2**bits
        assert levels[0] == -1 and levels[-1] == 1 and 0 in levels


def test_uniform_levels_are_at_equal_distances_from_end_to_end() -> None:
    assert uniform_levels(1).tolist() == [-1, 1]
    torch.testing.assert_close(uniform_levels(2), torch.tensor([-3.0, -1.0, 1.0, 3.0]) / 3)


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 3, 4, 8]))
def test_nearest_is_nearest(seed: int, bits: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    levels = torch.rand(2**bits, generator=generator).sort().values * 2 - 1
    x = torch.randn(50, generator=generator)
    codes = nearest(x, levels)
    distance = (x[:, None] - levels).abs()
    found = distance.gather(1, codes.long()[:, None])[:, 0]
    torch.testing.assert_close(found, distance.min(1).values)


@given(st.integers(0, 2**32 - 1), st.integers(1, 6))
def test_nearest_is_the_place_among_the_edges(seed: int, bits: int) -> None:
    """Whichever way it is found: numbers on an edge, equal levels and infinities too."""
    generator = torch.Generator().manual_seed(seed)
    levels = torch.randint(-4, 5, (2**bits,), generator=generator).sort().values.float()
    edges = edges_of(levels)
    x = torch.cat([edges, levels, torch.randn(30, generator=generator), torch.tensor([torch.inf])])
    x = torch.cat([x, -x])
    assert torch.equal(nearest(x, levels), torch.bucketize(x, edges).to(torch.uint8))


@settings(max_examples=examples(100), deadline=None)
@given(blocks(), st.integers(0, 4), st.sampled_from([-1, -2]))
def test_the_inner_range_leaves_as_many_at_both_ends(x: torch.Tensor, count: int, dim: int) -> None:
    count = min(count, x.shape[dim] - 1)
    low, high = inner_range(x, dim, count)
    ordered = x.sort(dim).values.movedim(dim, -1)
    last = ordered.shape[-1] - 1
    ends = {(count // 2, count - count // 2), (count - count // 2, count // 2)}
    widths = torch.stack([ordered[..., last - top] - ordered[..., below] for below, top in ends])
    torch.testing.assert_close((high - low).movedim(dim, -1)[..., 0], widths.min(0).values)
    below, above = (x < low).sum(dim), (x > high).sum(dim)
    assert ((below - above).abs() <= count % 2).all()
    assert (((x < low) | (x > high)).sum(dim) == count).all()


@settings(max_examples=examples(150), deadline=None)
@given(blocks(), st.sampled_from([0.0, 0.01, 0.1]), st.sampled_from(["token", "channel"]))
def test_outliers_come_back_in_fp16_and_the_rest_within_its_range(
    x: torch.Tensor, share: float, per: Any
) -> None:
    quantizer = Codebook(2, per, 0, LEVELS, share)
    packed = quantizer.encode(x, None)
    back = torch.full_like(x, torch.nan)
    quantizer.decode(packed, back)
    dim = -1 if per == "token" else -2
    count = outlier_count(share, x.shape[dim])
    apart = quantizer.scaled(x, None).outliers
    if share == 0:
        assert apart is None and "outlier_excess" not in packed
        apart = torch.zeros_like(x, dtype=torch.bool)
    assert (apart.sum(dim) == count).all()
    assert ((back - x).abs() <= 2**-11 * 2 * x.abs().amax() + 2**-24)[apart].all()
    rest = x.masked_fill(apart, torch.inf).amin(dim, keepdim=True)
    top = x.masked_fill(apart, -torch.inf).amax(dim, keepdim=True)
    # The levels' widest gap is 0.875 of half the range; their ends are 0.1 short of it.
    bound = (0.4375 + 0.01) * (top - rest) / 2 + 2e-3 * x.abs().amax() + 1e-4
    assert ((back - x).abs() <= bound)[~apart].all()
    held = sum(t.nbytes for t in packed.values())
    size = Segment(x.shape[2], quantizer).parts(x.shape[1]).total() * len(x)
    assert held == size + OUTLIER_NBYTES * int(apart.sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outliers_are_added_before_rounding_to_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    x = torch.randn(2, 8, 40) * 30
    x[0, 0, 0], x[1, 2, 3] = 65504.0, 1e6
    quantizer = Codebook(2, "token", 0, LEVELS, share=0.1)
    packed = quantizer.encode(x, None)
    exact, rounded = torch.empty_like(x), torch.empty_like(x, dtype=dtype)
    quantizer.decode(packed, exact)
    quantizer.decode(packed, rounded)
    assert rounded.isfinite().all()
    assert torch.equal(rounded, exact.clamp(-65504, 65504).to(dtype))


def test_outliers_are_stored_as_these_bytes() -> None:
    x = torch.tensor([[[0.0, 1.0, -9.0], [1.0, 0.5, 0.0]], [[8.0, 0.0, 1.0], [7.0, 0.0, -7.0]]])
    bounds = torch.tensor(-2.0), torch.tensor(2.0)
    quantizer = Codebook(2, "token", 0, torch.tensor([-1, -0.5, 0, 1]), threshold=bounds)
    packed = quantizer.encode(x, None)
    counts, values, channels = (packed[f"outlier_{n}"] for n in ("count", "excess", "channel"))
    assert isinstance(counts, torch.Tensor) and counts.dtype == torch.uint8
    assert isinstance(values, Ragged) and isinstance(channels, Ragged)
    assert counts.tolist() == [[1, 0], [1, 2]]
    # What is no outlier spans 0 to 1, and 0 to 0 for the last token.
    assert [run.tolist() for run in values.blocks] == [[-9.0], [7.0, 7.0, -7.0]]
    assert [run.tolist() for run in channels.blocks] == [[2], [0, 0, 2]]
    assert values.blocks[0].dtype == torch.float16 and channels.blocks[0].dtype == torch.int16


def test_many_channels_are_numbered_in_sixteen_bits() -> None:
    x = torch.zeros(1, 2, 40_000)
    x[0, 1, 39_999] = 5.0
    x[0, 1, :300] = 4.0
    quantizer = Codebook(1, "token", 0, uniform_levels(1), threshold=(x.min() - 1, x.min() + 1))
    back = torch.empty_like(x)
    quantizer.decode(quantizer.encode(x, None), back)
    assert torch.equal(back, x)


@pytest.mark.parametrize("channels", [255, 256])
def test_all_channels_of_a_token_may_be_outliers(channels: int) -> None:
    x = torch.zeros(1, 2, channels)
    x[0, 0] = 5.0
    bounds = torch.tensor(-1.0), torch.tensor(1.0)
    quantizer = Codebook(1, "token", 0, uniform_levels(1), threshold=bounds)
    packed, back = quantizer.encode(x, None), torch.empty_like(x)
    assert dense(packed, "outlier_count").tolist() == [[channels, 0]]
    quantizer.decode(packed, back)
    assert torch.equal(back, x)


def test_offline_ranges_are_not_stored_and_clip_what_is_no_outlier() -> None:
    span = torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 4.0])
    x = torch.tensor([[[0.25, 3.9], [7.0, -3.0]]])
    for threshold, far in ((None, [1.0, 0.2]), (span, [7.0, -3.0])):
        quantizer = Codebook(2, "channel", 0, LEVELS, threshold=threshold, span=span)
        packed = quantizer.encode(x, None)
        assert "scale" not in packed and "zero" not in packed
        back = torch.empty_like(x)
        quantizer.decode(packed, back)
        torch.testing.assert_close(back[0], torch.tensor([[0.125, 4.0], far]), atol=2e-3, rtol=0)
        assert quantizer.table_nbytes == 2 * (4 + 4)


BOUNDS = -torch.ones(20), torch.ones(20)


@pytest.mark.parametrize("per", ["token", "channel"])
@pytest.mark.parametrize(
    "found", [{"share": 0.1}, {"threshold": BOUNDS}, {"threshold": BOUNDS, "span": BOUNDS}]
)
def test_excluded_tokens_set_no_range_and_are_no_outliers(found: Any, per: Any) -> None:
    x = torch.randn(1, 8, 20)
    excluded = torch.zeros(1, 8, dtype=torch.bool)
    excluded[0, 2] = True
    other = x.clone()
    other[0, 2] = 1000.0
    quantizer = Codebook(3, per, 0, uniform_levels(3), **found)
    one, two = quantizer.encode(x, excluded), quantizer.encode(other, excluded)
    back = [torch.empty_like(x) for _ in range(2)]
    for packed, out in zip((one, two), back, strict=True):
        assert packed["outlier_count"][0, 2] == 0
        quantizer.decode(packed, out)
    assert torch.equal(back[0][~excluded], back[1][~excluded])
    quantizer.decode(quantizer.encode(x, torch.ones(1, 8, dtype=torch.bool)), back[0])
    assert back[0].isfinite().all()


def test_a_block_without_tokens_that_count_has_no_range() -> None:
    quantizer = Codebook(2, "channel", 0, LEVELS, share=0.2)
    packed = quantizer.encode(torch.randn(1, 8, 20) + 5, torch.ones(1, 8, dtype=torch.bool))
    assert not dense(packed, "scale").any() and not dense(packed, "zero").any()
    assert not dense(packed, "outlier_count").any()


def test_bounds_past_fp16_saturate() -> None:
    for low, high in ((-1e6, 1.0), (-1.0, 1e6)):
        span = torch.full((3,), low), torch.full((3,), high)
        quantizer = Codebook(2, "channel", 0, uniform_levels(2), span=span)
        back = torch.empty(1, 2, 3)
        quantizer.decode(quantizer.encode(torch.tensor([[[low] * 3, [high] * 3]]), None), back)
        want = torch.tensor([low, high]).clamp(-65504, 65504)[:, None].expand(2, 3)
        torch.testing.assert_close(back[0], want, rtol=1e-3, atol=40)


@pytest.mark.parametrize("per", ["token", "channel"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_blocks_in_the_models_dtype_are_packed_as_their_fp32_numbers(dtype: torch.dtype, per: Any) -> None:
    x = (torch.randn(2, 16, 20) * 3).to(dtype)
    for quantizer in (
        Affine(3, per, 8),
        Codebook(3, per, 0, uniform_levels(3), share=0.1),
        Ranked(torch.zeros(20, dtype=torch.int16), counts_of({0.5: 5, 1.5: 5, 3: 5, 6: 5})),
    ):
        own, wide = quantizer.encode(x, None), quantizer.encode(x.float(), None)
        for name, field in own.items():
            other = wide[name]
            if isinstance(field, Ragged):
                assert isinstance(other, Ragged)
                field, other = field.flat(), other.flat()
            assert torch.equal(field, other)


def test_nan_is_refused() -> None:
    with pytest.raises(ValueError, match="NaN"):
        Codebook(2, "token", 0, LEVELS).encode(torch.full((1, 2, 3), torch.nan), None)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"levels": LEVELS[:3]}, r"levels of 2 bits are not \[3\]"),
        ({"levels": LEVELS[None]}, r"levels of 2 bits are not \[1, 4\]"),
        ({"levels": LEVELS.flip(0)}, "not in rising order"),
        ({"levels": LEVELS * torch.nan}, "hold NaN"),
        ({"threshold": (torch.tensor(torch.nan), torch.tensor(1.0))}, "hold NaN"),
        ({"threshold": (torch.zeros(2, 3), torch.ones(2, 3))}, "for all channels, or one for each"),
        ({"span": (torch.zeros(3), torch.ones(4))}, "for all channels, or one for each"),
        (
            {"span": (torch.zeros(3),) * 2, "threshold": (torch.ones(4),) * 2},
            "for all channels, or one for each",
        ),
    ],
)
def test_tables_that_do_not_fit_are_refused(wrong: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Codebook(**{"bits": 2, "per": "channel", "group": 0, "levels": LEVELS, **wrong})


def test_a_segment_is_of_the_channels_that_its_tables_are_for() -> None:
    bounds = torch.zeros(3), torch.ones(3)
    for quantizer in (
        Codebook(2, "channel", 0, LEVELS, span=bounds),
        Codebook(2, "channel", 0, LEVELS, threshold=bounds),
        Ranked(torch.zeros(3, dtype=torch.int16), counts_of({})),
    ):
        Segment(3, quantizer)
        with pytest.raises(ValueError, match="of 3 channels cannot store 4"):
            Segment(4, quantizer)
    Segment(4, Codebook(2, "token", 0, LEVELS, threshold=(torch.zeros(1), torch.ones(1))))
