"""Ranked codes: the levels, who gets how many bits, and what a block is stored as."""

from itertools import combinations_with_replacement
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.ranked_counts import counts_of
from xquant.quant import Segment
from xquant.quant.levels import NORMAL, TAILED, Mixture, best_levels, normal_error, normal_levels
from xquant.quant.quantizer import dense
from xquant.quant.ranked import EVEN_WEIGHT, REST_STEPS, Ranked, allot, weights_of
from xquant.quant.steps import steps_of
from xquant.quant.trellis import MOST_WEIGHT, WIDTHS, Width

# Mean squared errors of Max (1960), Table I, for 2, 4, 8, 16 and 32 levels.
MAX_1960 = [0.3634, 0.1175, 0.03454, 0.009497, 0.002499]


@st.composite
def cases(draw: Any) -> tuple[Ranked, torch.Tensor]:
    """A quantizer and blocks whose channels differ in size by orders of magnitude."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    channels, tokens = draw(st.integers(1, 20)), draw(st.sampled_from([1, 15, 16, 32, 40]))
    size = 10 ** (4 * torch.rand(channels, generator=generator) - 2)
    x = torch.randn(draw(st.integers(1, 3)), tokens, channels, generator=generator) * size
    usual = steps_of(size.square()).to(torch.int16)
    profile = size.square().sort(descending=True).values
    budget = draw(st.integers(0, 8 * channels))
    costs = torch.randn(channels, generator=generator) / size if draw(st.booleans()) else None
    return Ranked(usual, allot([profile], budget)[0], costs=costs), x


def decoded(quantizer: Ranked, x: torch.Tensor, excluded: torch.Tensor | None = None) -> Any:
    out = torch.empty_like(x)
    quantizer.decode(quantizer.encode(x, excluded), out)
    return out


def test_errors_of_the_levels_are_those_that_max_printed() -> None:
    for bits, error in enumerate(MAX_1960, 1):
        assert normal_error(normal_levels(bits)) == pytest.approx(error, rel=3e-3)
    for bits in (6, 7, 8):  # Panter and Dite: sqrt(3) pi / 2 / 4**b in the limit
        assert normal_error(normal_levels(bits)) * 4**bits == pytest.approx(2.7207, rel=0.05)


@pytest.mark.parametrize("mixture", [NORMAL, TAILED], ids=["normal", "tailed"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_levels_are_symmetric_and_means_of_what_is_nearest(bits: int, mixture: Mixture) -> None:
    levels = best_levels(bits, mixture)
    assert len(levels) == 2**bits and bool((levels.diff() > 0).all())
    torch.testing.assert_close(levels, -levels.flip(0))
    x = torch.linspace(-25, 25, 4_000_001, dtype=torch.float64)
    density = torch.stack([w / size * torch.exp(-(x / size).square() / 2) for w, size in mixture])
    nearest = torch.bucketize(x, (levels[1:] + levels[:-1]).double() / 2)
    share = torch.bincount(nearest, density.sum(0))
    mean = torch.bincount(nearest, density.sum(0) * x) / share
    torch.testing.assert_close(mean.float(), levels, atol=5e-4, rtol=0)


def test_a_token_far_out_is_clipped_in_narrow_codes_only() -> None:
    x = torch.randn(1, 128, 40, generator=torch.Generator().manual_seed(0))
    x[0, 40, 0] = far = 7 * x[0, :, 0].std()
    usual = steps_of(x.square().mean((0, 1))).to(torch.int16)
    for bits, close in ((3, False), (8, True)):
        quantizer = Ranked(usual, counts_of({bits: 40}))
        assert (abs(decoded(quantizer, x)[0, 40, 0] / far - 1) < 0.02) == close


@settings(deadline=None)
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=3), st.integers(0, 12))
def test_no_other_way_to_give_the_bits_costs_less(variances: list[float], budget: int) -> None:
    profile = torch.tensor(sorted(variances, reverse=True), dtype=torch.float64)
    errors = {0.0: 1.0} | {width.bits: width.error for width in WIDTHS}
    counts = allot([profile], budget)[0]
    given_bits = [w.bits for w, n in reversed([*zip(WIDTHS, counts, strict=True)]) for _ in range(n)]
    given_bits += [0] * (len(profile) - len(given_bits))
    assert sum(given_bits) == min(budget, 8 * len(profile))

    def cost(bits: Any) -> float:
        return sum(v * errors[b] for v, b in zip(profile.tolist(), bits, strict=True))

    every = combinations_with_replacement(sorted(errors, reverse=True), len(profile))
    best = min((cost(bits) for bits in every if sum(bits) <= budget - 0.5), default=cost(given_bits))
    assert cost(given_bits) <= best * (1 + 1e-9)


def test_layers_that_matter_more_get_more() -> None:
    profile = torch.tensor([4.0, 2.0, 1.0])
    small, large = allot([profile, 100 * profile], 9)
    bits = [sum(width.bits * n for width, n in zip(WIDTHS, counts, strict=True)) for counts in (small, large)]
    assert sum(bits) == 9 and bits[1] > bits[0]


def test_steps_are_thirds_of_an_octave_of_the_root_of_a_variance() -> None:
    octaves = torch.arange(-63, 64)
    for dtype in (torch.float32, torch.float64):
        variances = 4.0 ** octaves.to(dtype)
        assert torch.equal(steps_of(variances), 3 * octaves.int())
        # A third of an octave up, and almost half of one step either way.
        for factor, step in ((2 ** (2 / 3), 1), (2**0.333, 0), (2**-0.333, 0), (2**0.334, 1)):
            assert torch.equal(steps_of(variances * factor), 3 * octaves.int() + step)


@pytest.mark.parametrize(("bits", "left"), [(1, 0.4), (2, 0.14), (3, 0.06), (4, 0.02), (8, 0.002)])
def test_a_rest_takes_off_what_its_codes_would_of_any_channel(bits: int, left: float) -> None:
    x = torch.randn(4, 128, 12, generator=torch.Generator().manual_seed(0)) * torch.logspace(3, 1, 12)
    usual = steps_of(x.square().mean((0, 1))).to(torch.int16)
    alone = (decoded(Ranked(usual, counts_of({8: 12})), x) - x).square().mean((0, 1))
    counts = counts_of({8: 16} if bits == 8 else {8: 12, bits: 4})
    both = Ranked(torch.cat([usual, usual[:4] - REST_STEPS]), counts, 4)
    # What stands where rests will is not looked at.
    found = decoded(both, torch.cat([x, torch.full_like(x[..., :4], torch.nan)], -1))
    found[..., :4] += found[..., 12:]
    error = (found[..., :12] - x).square().mean((0, 1)) / alone
    assert error[:4].mean() < left
    torch.testing.assert_close(error[4:], torch.ones(8))


def test_codes_with_a_trellis_leave_no_rest() -> None:
    x = torch.randn(1, 32, 2, generator=torch.Generator().manual_seed(0))
    found = decoded(Ranked(torch.tensor([0, -9], dtype=torch.int16), counts_of({8: 1, 4: 1}), 1), x)
    narrow = Ranked(torch.tensor([0, -9], dtype=torch.int16), counts_of({4: 2}), 1)
    assert decoded(narrow, x)[..., 1].abs().max() < 0.1 < found[..., 0].abs().max()


def test_rests_are_of_channels_that_are_none() -> None:
    with pytest.raises(ValueError, match="5 channels cannot be rests of 3 among them"):
        Ranked(torch.zeros(5, dtype=torch.int16), counts_of({8: 5}), 3)


@settings(deadline=None)
@given(cases())
def test_a_block_takes_the_bytes_of_the_formula(case: tuple[Ranked, torch.Tensor]) -> None:
    quantizer, x = case
    held = sum(dense(quantizer.encode(x, None), n)[0].nbytes for n in ("codes", "scale", "gain"))
    assert held == Segment(x.shape[2], quantizer).parts(x.shape[1]).total()


@settings(deadline=None)
@given(cases(), st.integers(0, 2**32 - 1))
def test_tokens_that_do_not_count_change_no_other(case: tuple[Ranked, torch.Tensor], seed: int) -> None:
    quantizer, x = case
    excluded = torch.rand(x.shape[:2], generator=torch.Generator().manual_seed(seed)) < 0.3
    loud = torch.where(excluded.unsqueeze(-1), 1e4 * x.abs() + 1e3, x)
    kept = ~excluded
    plain, changed = (decoded(quantizer, t, excluded) for t in (x, loud))
    assert torch.equal(plain[kept], changed[kept])


@settings(deadline=None)
@given(cases())
def test_blocks_do_not_depend_on_each_other(case: tuple[Ranked, torch.Tensor]) -> None:
    quantizer, x = case
    together = decoded(quantizer, x)
    for i in range(len(x)):
        assert torch.equal(decoded(quantizer, x[i : i + 1]), together[i : i + 1])


def test_errors_are_those_of_the_levels() -> None:
    size = torch.logspace(1, -1, 60)
    x = torch.randn(8, 128, 60, generator=torch.Generator().manual_seed(0)) * size
    quantizer = Ranked(steps_of(size.square()).to(torch.int16), counts_of({1: 15, 2: 15, 3: 15, 4: 15}))
    error = (decoded(quantizer, x) - x).square().mean((0, 1)) / size.square()
    for first, bits in ((0, 4), (15, 3), (30, 2), (45, 1)):
        # Scales and gains are rounded to a third of an octave.
        within = error[first + 3 : first + 12].mean()
        best = next(width.error for width in WIDTHS if width.bits == bits)
        assert best * 0.9 < within < best * 1.25 + 0.004


def test_a_channel_that_is_louder_in_a_block_gets_the_wider_codes_there() -> None:
    x = torch.randn(1, 64, 2, generator=torch.Generator().manual_seed(0))
    quantizer = Ranked(torch.zeros(2, dtype=torch.int16), counts_of({4: 1}))
    for loud in (0, 1):
        scaled = x.clone()
        scaled[..., loud] *= 2
        error = (decoded(quantizer, scaled) - scaled).square().mean((0, 1)) / scaled.square().mean((0, 1))
        assert error[loud] < 0.05 and error[1 - loud] > 0.5


def test_every_token_has_a_gain_of_its_own() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 32, 40, generator=generator)
    gains = 2.0 ** (torch.arange(32) % 5 - 2)
    quantizer = Ranked(torch.zeros(40, dtype=torch.int16), counts_of({3: 40}))
    x = x * gains[:, None]
    error = (decoded(quantizer, x) - x).square().mean((0, 2)) / x.square().mean((0, 2))
    assert bool((error < 5 * MAX_1960[2]).all())


def test_errors_of_loud_tokens_count_more() -> None:
    """The error of all tokens together is smaller than if each counted the same."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 64, 40, generator=generator)
    x = x * 2.0 ** (torch.arange(64) % 3 - 1)[:, None]
    quantizer = Ranked(torch.zeros(40, dtype=torch.int16), counts_of({2: 40}))
    error = (decoded(quantizer, x) - x).square().mean() / x.square().mean()
    assert error < 0.93 * Width(2).error


def test_errors_count_by_what_they_are_predicted_to_cost() -> None:
    costs = torch.tensor([[-9.0, -1.0, 0.0, 1.0, 9.0, 50.0]])
    hidden = torch.tensor([[False, False, False, False, False, True]])
    found = weights_of(costs, hidden)[0].tolist()
    assert found == sorted(found) and (found[0], found[2], found[4]) == (1, EVEN_WEIGHT, MOST_WEIGHT)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 64, 8, generator=generator)
    usual, counts = torch.zeros(8, dtype=torch.int16), counts_of({2: 8})
    dear = x[..., 0] > 0
    costly, plain = (
        (decoded(each, x) - x).square()
        for each in (Ranked(usual, counts, 0, c) for c in (4 * torch.eye(8)[0], None))
    )
    assert float(costly[dear].mean()) < 0.8 * float(costly[~dear].mean())
    assert float(costly[dear].mean()) < 0.9 * float(plain[dear].mean())


def test_scales_far_from_the_usual_ones_saturate() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 64, 40, generator=generator)
    x[..., 0] *= 64  # 18 steps up; there are 5
    x[..., 1] /= 64
    quantizer = Ranked(torch.zeros(40, dtype=torch.int16), counts_of({4: 40}))
    back = decoded(quantizer, x)
    loud, quiet = (back[0, :, c].square().mean() / x[0, :, c].square().mean() for c in (0, 1))
    assert 2 ** (2 * 5 / 3) / 64**2 < loud < 1
    assert 1 < quiet < 64**2 / 2 ** (2 * 10 / 3)


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e30, torch.inf, -torch.inf])
def test_extreme_blocks_stay_finite(value: float) -> None:
    quantizer = Ranked(torch.zeros(3, dtype=torch.int16), counts_of({0.5: 1, 2: 1, 8: 1}))
    assert bool(decoded(quantizer, torch.full((1, 16, 3), value)).isfinite().all())


def test_nan_is_refused() -> None:
    quantizer = Ranked(torch.zeros(1, dtype=torch.int16), counts_of({1: 1}))
    with pytest.raises(ValueError, match="NaN"):
        quantizer.encode(torch.full((1, 16, 1), torch.nan), None)


@pytest.mark.parametrize(
    ("usual", "counts", "why"),
    [
        (torch.zeros(3), counts_of({}), r"int16 \[C\], not torch.float32 \[3\]"),
        (torch.zeros(3, 1, dtype=torch.int16), counts_of({}), r"not torch.int16 \[3, 1\]"),
        (torch.zeros(3, dtype=torch.int16), counts_of({1: 2, 2: 2}), "3 channels cannot have"),
        (torch.zeros(3, dtype=torch.int16), counts_of({1: 4, 2: -2}), "3 channels cannot have"),
        (torch.zeros(3, dtype=torch.int16), (1, 1), "3 channels cannot have"),
    ],
)
def test_tables_that_do_not_fit_are_refused(usual: torch.Tensor, counts: tuple[int, ...], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Ranked(usual, counts)


@pytest.mark.parametrize("costs", [torch.zeros(3), torch.zeros(2, dtype=torch.float64), torch.zeros(2, 1)])
def test_costs_that_do_not_fit_are_refused(costs: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"costs are fp32 \[2\], not"):
        Ranked(torch.zeros(3, dtype=torch.int16), counts_of({8: 3}), 1, costs)
