"""Trellis codes: what a window selects, how good the codes that are found are, and that a row is a circle."""

from itertools import product

import pytest
import torch

from xquant.quant.levels import TAILED, best_levels, normal_error, normal_levels
from xquant.quant.trellis import MOST_WEIGHT, TRELLIS, WIDTHS, Width, search


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def error_of(width: Width, x: torch.Tensor) -> torch.Tensor:
    return (width.decode(width.encode(x, None)) - x).square()


@pytest.mark.parametrize("width", WIDTHS, ids=lambda w: f"{w.bits:g}")
def test_errors_are_as_told_all_around_the_circle(width: Width) -> None:
    error = error_of(width, normal(4, 128, 256))
    assert error.mean() == pytest.approx(width.error, rel=0.03)
    ends = torch.cat([error[:, :8], error[:, -8:]], 1)
    assert ends.mean() == pytest.approx(width.error, rel=0.08)


def test_a_trellis_is_worth_a_sixth_of_a_bit_or_more() -> None:
    for width in TRELLIS:
        if width.tokens == 1:
            assert width.error * 2**0.3 < normal_error(normal_levels(width.code))
        assert 2 ** (-2 * width.bits) < width.error  # Shannon: none is better


def test_levels_without_a_trellis_are_the_best() -> None:
    for width in (width for width in WIDTHS if not width.trellis):
        best = best_levels(width.code, TAILED)
        torch.testing.assert_close(width.levels[:, 0], best, atol=1e-5, rtol=0)


@pytest.mark.parametrize("width", WIDTHS, ids=lambda w: f"{w.bits:g}")
def test_a_window_is_the_bits_before_it_in_the_circle(width: Width) -> None:
    count = 16 // width.tokens
    codes = torch.randint(0, 2**width.code, (2, count, 3), generator=torch.Generator().manual_seed(0))
    windows, levels = width.windows(codes.byte()), width.decode(codes.byte())
    for block, channel, at in product(range(2), range(3), range(count)):
        bits = "".join(f"{int(c):0{width.code}b}" for c in codes[block, :, channel].roll(-at - 1))
        window = int(bits[-width.window :], 2)
        assert windows[block, at, channel] == window
        first = at * width.tokens
        assert torch.equal(levels[block, first : first + width.tokens, channel], width.levels[window])


@pytest.mark.parametrize("width", TRELLIS[:2], ids=lambda w: f"{w.bits:g}")
def test_no_codes_that_begin_alike_are_better(width: Width) -> None:
    """Where a circle begins, its last seven bits, is found by a search of its own. All else is the best."""
    count = 16 // width.tokens
    x = normal(1, 16, 12)
    numbers = torch.arange(2**count)
    every = torch.stack([numbers >> i & 1 for i in range(count)]).byte()  # [S, all]
    levels = width.decode(every[None])[0]  # [16, all]
    errors = (x[0, :, :, None] - levels[:, None]).square().sum(0)  # [12, all]
    codes = width.encode(x, None)[0]
    for channel in range(12):
        alike = (every[-7:] == codes[-7:, channel, None]).all(0)
        found = (every == codes[:, channel, None]).all(0)
        assert errors[channel, found] <= errors[channel, alike].min() * 1.001


def test_hidden_tokens_ask_for_nothing() -> None:
    x, hidden = normal(2, 64, 60), torch.zeros(2, 64, dtype=torch.bool)
    hidden[:, ::4] = True
    for width in TRELLIS:
        codes = width.encode(x, (~hidden).int())
        loud = torch.where(hidden[..., None], 1e9, x)
        assert torch.equal(width.encode(loud, (~hidden).int()), codes)
        error = (width.decode(codes) - x).square()[~hidden].mean()
        assert error < width.error


@pytest.mark.parametrize("width", TRELLIS, ids=lambda w: f"{w.bits:g}")
def test_what_counts_more_is_nearer(width: Width) -> None:
    x = normal(2, 64, 60)
    weights = torch.where(torch.arange(64) % 4 == 0, MOST_WEIGHT, 1).expand(2, -1)
    error = (width.decode(width.encode(x, weights)) - x).square().mean((0, 2))
    even = (width.decode(width.encode(x)) - x).square().mean((0, 2))
    assert error[::4].mean() < 0.9 * even[::4].mean()
    assert (weights[0] * error).sum() < (weights[0] * even).sum()


def test_numbers_far_out_get_the_level_that_is_farthest() -> None:
    x = normal(1, 32, 4)
    x[0, 10] = torch.tensor([30.0, -30.0, 1e30, -torch.inf])
    for width in TRELLIS:
        found = width.decode(width.encode(x, None))[0, 10]
        assert torch.equal(found.sign(), x[0, 10].sign())
        assert bool((found.abs() > 0.5 * width.levels.abs().max()).all())


def test_other_rows_and_other_sizes_of_rows_change_nothing() -> None:
    x, width = normal(3, 48, 7), TRELLIS[3]
    together = width.encode(x, None)
    assert torch.equal(width.encode(x[1:2, :, 2:4], None), together[1:2, :, 2:4])
    with pytest.raises(ValueError, match="a multiple of 16 tokens, not 24"):
        width.encode(x[:, :24], None)


def test_the_cost_of_equal_ways_is_that_of_the_first() -> None:
    """Ties are broken by rule, so that kernels can give the same codes."""
    width, levels = Width(1), torch.zeros(256, 1)
    codes = search(normal(1, 32, 3), None, width, levels, 100.0)
    assert not codes.any()
