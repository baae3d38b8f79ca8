"""Classes of tokens: who is in which, and what each is stored as."""

import torch
from hypothesis import given, settings
from torch import Tensor

from support.classed_blocks import classed_blocks
from xquant.quant import Segment
from xquant.quant.classes import EVEN_WEIGHT, Classed, by_cost, shares, weights_of
from xquant.quant.quantizer import dense
from xquant.quant.ranked import Ranked


@settings(deadline=None)
@given(classed_blocks())
def test_each_class_reads_as_a_block_of_its_own(case: tuple[Classed, Tensor, Tensor | None]) -> None:
    quantizer, x, excluded = case
    packed = quantizer.encode(x, excluded)
    out = torch.full_like(x, 7.0)
    quantizer.decode(packed, out)
    assert torch.equal(out[..., -1], torch.zeros_like(out[..., -1]))
    costs = x[..., -1] if excluded is None else x[..., -1].masked_fill(excluded, -torch.inf)
    before = torch.full((len(x),), torch.inf)
    seen = torch.zeros(x.shape[:2], dtype=torch.bool)
    for part, tokens in zip(
        quantizer.parts, by_cost(x[..., -1], excluded, len(quantizer.parts)), strict=True
    ):
        if not tokens.shape[1]:
            continue
        own = costs.gather(1, tokens)
        assert bool((own.amax(1) <= before).all())  # no class has a token that costs more than one before
        before = own.amin(1)
        assert not seen.gather(1, tokens).any() and bool((tokens.diff(dim=1) > 0).all())
        seen.scatter_(1, tokens, True)
        rows = x[..., :-1].gather(1, tokens[..., None].expand(-1, -1, x.shape[2] - 1))
        hidden = None if excluded is None else excluded.gather(1, tokens)
        wanted = torch.empty_like(rows)
        weights = weights_of(x[..., -1].gather(1, tokens), hidden)
        part.decode(part.encode(rows, hidden, weights), wanted)
        found = out[..., :-1].gather(1, tokens[..., None].expand_as(rows))
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert bool(seen.all())


@settings(deadline=None)
@given(classed_blocks())
def test_blocks_have_the_fields_that_are_planned(case: tuple[Classed, Tensor, Tensor | None]) -> None:
    quantizer, x, excluded = case
    packed = quantizer.encode(x, excluded)
    fields = Segment(x.shape[2], quantizer).fields(x.shape[1])
    assert fields.keys() == packed.keys()
    for name, field in fields.items():
        assert (dense(packed, name).shape[1:], dense(packed, name).dtype) == (field.shape, field.dtype)
        streams = quantizer.streams(name, x.shape[1])
        parts = streams.apart(dense(packed, name))
        again = streams.together(
            torch.cat(parts or [dense(packed, name).flatten()]), field.dtype, (len(x), *field.shape)
        )
        assert torch.equal(again, dense(packed, name))


def test_errors_count_by_what_they_cost() -> None:
    costs = torch.tensor([[-9.0, -1.0, 0.0, 1.0, 9.0, 50.0]])
    hidden = torch.tensor([[False, False, False, False, False, True]])
    found = weights_of(costs, hidden)[0].tolist()
    assert found == sorted(found) and (found[0], found[2], found[4]) == (1, EVEN_WEIGHT, 16)
    quantizer = Ranked(torch.zeros(8, dtype=torch.int16), (0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0))
    x = torch.randn(16, 64, 8, generator=torch.Generator().manual_seed(0))
    weights = torch.ones(16, 64, dtype=torch.uint8)
    weights[:, ::2] = 16
    out = torch.empty_like(x)
    quantizer.decode(quantizer.encode(x, None, weights), out)
    lost = (x - out).square()
    assert float(lost[:, ::2].mean()) < 0.7 * float(lost[:, 1::2].mean())


def test_classes_of_a_short_block_have_nearly_one_size() -> None:
    assert shares(128, 4) == [32] * 4
    assert shares(5, 4) == [1, 1, 1, 2]
    assert shares(1, 4) == [0, 0, 0, 1]
