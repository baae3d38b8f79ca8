"""Classes of tokens: who is in which, and what each is stored as."""

import torch
from hypothesis import given, settings
from torch import Tensor

from support.classed_blocks import classed_blocks
from xquant.quant import Segment
from xquant.quant.classes import Classed, by_cost, shares
from xquant.quant.quantizer import dense


@settings(deadline=None)
@given(classed_blocks())
def test_each_class_reads_as_a_block_of_its_own(case: tuple[Classed, Tensor, Tensor | None]) -> None:
    quantizer, x, excluded = case
    packed = quantizer.encode(x, excluded)
    out = torch.full_like(x, 7.0)
    quantizer.decode(packed, out)
    costs = every = quantizer.parts[0].cost(x, excluded)
    if excluded is not None:
        costs = costs.masked_fill(excluded, -torch.inf)
    before = torch.full((len(x),), torch.inf)
    seen = torch.zeros(x.shape[:2], dtype=torch.bool)
    chosen = by_cost(every, excluded, len(quantizer.parts))
    for part, tokens in zip(quantizer.parts, chosen, strict=True):
        if not tokens.shape[1]:
            continue
        own = costs.gather(1, tokens)
        assert bool((own.amax(1) <= before).all())  # no class has a token that costs more than one before
        before = own.amin(1)
        assert not seen.gather(1, tokens).any() and bool((tokens.diff(dim=1) > 0).all())
        seen.scatter_(1, tokens, True)
        rows = x.gather(1, tokens[..., None].expand(-1, -1, x.shape[2]))
        hidden = None if excluded is None else excluded.gather(1, tokens)
        wanted = torch.empty_like(rows)
        part.decode(part.encode(rows, hidden), wanted)
        found = out.gather(1, tokens[..., None].expand_as(rows))
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


def test_classes_of_a_short_block_have_nearly_one_size() -> None:
    assert shares(128, 4) == [32] * 4
    assert shares(5, 4) == [1, 1, 1, 2]
    assert shares(1, 4) == [0, 0, 0, 1]
