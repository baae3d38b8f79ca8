"""What is worked out once for all layers of a step."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.examples import examples
from support.host_waits import Silent
from xquant.past.noted import Noted
from xquant.past.sequences import FixedSequences, Sequences
from xquant.past.slots import Slots
from xquant.past.step import Batch, NewTokens, Retention, in_whole_blocks

CPU = torch.device("cpu")


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
    starts, lengths = np.array([0, 3, 3, 8], np.int32), np.array([10, 7, 5], np.int32)
    known = starts.tolist(), lengths.tolist()
    batch = Batch(starts, lengths, known, torch.arange(6, dtype=torch.int32).view(3, 2))
    rings = Batch(starts, lengths, known, torch.tensor([[6], [0], [9]]))
    retention, begun = Retention(4, 8, tail=4), Noted(2)
    begun.note(6, 4, 9)
    step = rings.step_of(batch, retention, begun)
    assert step is rings.step_of(batch, retention, begun)
    assert step.new_tokens == [NewTokens(0, 3, 7), NewTokens(3, 8, 0)]
    assert step.at.table.tolist() == [[0, 1], [4, 5]]
    _, chunks = step.readers(native=False)
    assert [chunk.sealed for chunk in chunks.each] == [4, 0]  # that of ring 6 has no tokens before the fourth
    assert chunks.kept.tolist() == chunks.rows.tolist() == list(range(8))
    assert chunks.places[0].tolist() == [6] * 3 + [9] * 5
    assert chunks.places[1].tolist() == [7, 0, 1, 0, 1, 2, 3, 4]


def test_what_is_read_from_pages() -> None:
    recent, nothing = Retention(4, 8, tail=3), np.zeros(5, np.int32)
    before = np.array([0, 6, 7, 10, 11], np.int32)
    assert recent.sealed(before, before + 1, nothing).tolist() == [0, 0, 4, 4, 8]
    # Rings that begin with the eighth have none of the tokens before.
    assert recent.sealed(before, before + 1, nothing + 8).tolist() == [8] * 5
    assert Retention(4, 4, 0, through_store=True).sealed(before, before + 2, nothing).tolist() == [
        0,
        8,
        8,
        12,
        12,
    ]


def test_a_batch_may_be_empty() -> None:
    none = np.zeros(0, np.int32)
    empty = Batch(np.zeros(1, np.int32), none, ([0], []), torch.zeros(0, 2, dtype=torch.int32))
    step = empty.step_of(empty, Retention(4, 8), Noted(2))
    assert step.filled is None and not step.readers(native=True)[1].each


def test_layers_with_other_rings_read_their_own() -> None:
    """Though they share pages, and take turns."""
    starts, lengths = np.array([0, 1, 2], np.int32), np.array([10, 7], np.int32)
    known, begun = (starts.tolist(), lengths.tolist()), Noted(2)
    tables = torch.arange(6, dtype=torch.int32).view(2, 3), *(torch.tensor([[a], [a + 1]]) for a in (6, 8))
    pages, *rings = (Batch(starts, lengths, known, table, FixedSequences(CPU, 2)) for table in tables)
    read = [each.step_of(pages, Retention(4, 8), begun).readers(native=True)[0][0] for each in rings]
    assert [sequences.held[:, 0].tolist() for sequences in read] == [[6, 7], [8, 9]]


@settings(max_examples=examples(50), deadline=None)
@given(st.data())
def test_a_device_works_out_what_the_host_does(data: st.DataObject) -> None:
    """At the same addresses in every step; without being asked, where no block is completed and nothing read
    through the store."""
    slots = Slots(2) if data.draw(st.booleans()) else None
    retention = Retention(4, 12, data.draw(st.integers(0, 5)), data.draw(st.booleans()), slots)
    memory, begun = FixedSequences(CPU, 6), Noted(2)
    count = data.draw(st.integers(1, 6))
    queries = 1 if retention.through_store else data.draw(st.integers(1, 3))
    found: list[Sequences] = []
    for _ in range(2):
        numbers = st.lists(st.integers(0, 40), min_size=count, max_size=count)
        lengths = np.array(data.draw(numbers), np.int32) + queries
        starts = np.arange(count + 1, dtype=np.int32) * queries
        pages = np.array(data.draw(st.permutations(range(60)))[: count * 10], np.int32).reshape(count, 10)
        rings = np.array(data.draw(st.permutations(range(9)))[:count], np.int32)[:, None]
        if slots is not None:
            slots.write(pages[:, 0].tolist(), [0] * count)
        begun.note(int(rings[0, 0]), data.draw(st.integers(0, 3)) * 4, 0)
        known = starts.tolist(), lengths.tolist()

        tables = torch.from_numpy(pages), torch.from_numpy(rings)

        def read(told: Any, memory: Any = None, known: Any = known, tables: Any = tables) -> Any:
            own = [Batch(*told, known, each, memory) for each in tables]
            (found,), chunks = own[1].step_of(own[0], retention, begun).readers(native=True)
            assert not chunks.each
            return found

        wanted = read((starts, lengths))
        told = torch.from_numpy(starts), torch.from_numpy(lengths)
        found.append(read(told, memory))  # where what was noted is written
        filled = (lengths // 4 > (lengths - queries) // 4).any()
        with nullcontext() if filled or retention.through_store else Silent():
            found.append(read(told, memory))
        for name in ("first", "table", "limits", "held", "new", "sinks"):
            want, *each = (getattr(of, name) for of in (wanted, *found[-2:]))
            assert all(want is None if of is None else torch.equal(of, want) for of in each)
            addresses = {getattr(of, name).data_ptr() for of in found if getattr(of, name) is not None}
            assert len(addresses) <= 1
