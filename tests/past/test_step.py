"""What is worked out once for all layers of a step."""

from types import SimpleNamespace

import torch

from xquant.past.step import Batch, NewTokens, Retention, in_whole_blocks


def test_chunks_end_with_blocks_but_for_the_last() -> None:
    request = SimpleNamespace(num_computed_tokens=0, num_tokens=500)
    assert in_whole_blocks(128, request, 201) == 128
    assert in_whole_blocks(128, request, 127) == 0
    assert in_whole_blocks(128, request, 500) == 500
    assert in_whole_blocks(128, request, 201, 128, 0) == 128  # of tokens 128 to 328
    request.num_computed_tokens = 384
    assert in_whole_blocks(128, request, 100) == 0
    assert in_whole_blocks(128, request, 116) == 116


def test_sequences_without_new_tokens_are_left_out() -> None:
    batch = Batch.of([0, 3, 3, 8], [10, 7, 5, 0], torch.arange(8).view(4, 2))
    assert batch.new_tokens == [NewTokens(0, 3, 7), NewTokens(3, 8, 0)]
    assert batch.table.tolist() == [[0, 1], [4, 5]]
    rings = Batch(batch.new_tokens, torch.tensor([[6], [9]]))
    retention = Retention(4, 8, tail=4)
    step = rings.step_of(batch, retention, {6: (4, 9)})
    assert (
        step.new_tokens[0].since == 4
        and step.new_tokens[0].until == 9
        and step is rings.step_of(batch, retention, {})
    )
    _, chunks = step.readers(native=False)
    assert chunks.kept.tolist() == chunks.rows.tolist() == list(range(8))
    assert chunks.places[0].tolist() == [6] * 3 + [9] * 5
    assert chunks.places[1].tolist() == [7, 0, 1, 0, 1, 2, 3, 4]


def test_what_is_read_from_pages() -> None:
    recent = Retention(4, 8, tail=3)
    assert [recent.sealed(NewTokens(0, 1, before)) for before in (0, 6, 7, 10, 11)] == [
        0,
        0,
        4,
        4,
        8,
    ]
    assert recent.sealed(NewTokens(0, 1, 8, since=8)) == 8  # its ring has none of the tokens before
    assert Retention(4, 4, 0, through_store=True).sealed(NewTokens(0, 3, 6)) == 8
    empty = Batch([], torch.zeros(0, 2, dtype=torch.int32))
    step = empty.step_of(empty, recent, {})
    assert not step.filled and not step.readers(native=True)[1].each
