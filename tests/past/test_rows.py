"""Rows that grow: whatever was given out stays as it was, whoever goes on from it."""

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from support.examples import examples
from xquant.past.rows import ROOM, GrowingRows


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 20), st.booleans()), max_size=30))
def test_what_was_given_out_stays(steps: list[tuple[int, int, bool]]) -> None:
    growing, generator = GrowingRows(), torch.Generator().manual_seed(0)
    first = torch.randn(2, 3, 4, generator=generator)
    known = [(growing.extended(None, first), first)]
    for back, count, inference in steps:
        rows, wanted = known[max(len(known) - 1 - back, 0)]  # the newest, or one before
        new = torch.randn(2, count, 4, generator=generator)
        with torch.inference_mode(inference):
            found = growing.extended(rows, new)
        known.append((found, torch.cat([wanted, new], 1)))
    assert all(torch.equal(found, wanted) for found, wanted in known)


def test_a_token_at_a_time_is_seldom_copied() -> None:
    growing, rows, places = GrowingRows(), None, set()
    for _ in range(4 * ROOM):
        rows = growing.extended(rows, torch.zeros(1, 1, 8))
        places.add(rows.data_ptr())
    assert len(places) <= 5


def test_no_type_loses_what_another_holds() -> None:
    growing, exact = GrowingRows(), torch.randn(1, 3, 4)
    rows = growing.extended(None, exact)
    rows = growing.extended(rows, torch.ones(1, 2, 4, dtype=torch.bfloat16))
    assert rows.dtype == torch.float32 and torch.equal(rows[:, :3], exact)
    half = GrowingRows()
    rows = half.extended(half.extended(None, torch.ones(1, 2, 4, dtype=torch.bfloat16)), exact)
    assert rows.dtype == torch.float32 and torch.equal(rows[:, 2:], exact)


def test_what_was_let_go_of_is_freed() -> None:
    growing = GrowingRows()
    rows = growing.extended(None, torch.zeros(1, 5000, 8))
    kept = rows[:, -3:].clone()
    growing.forget()
    assert growing.extended(kept, torch.zeros(1, 1, 8)).untyped_storage().nbytes() < 5000
