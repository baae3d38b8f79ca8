"""Where sinks lie: a slot for each first page, given out again once the page holds something else."""

import pytest

from xquant.past.slots import Slots


def test_a_first_page_keeps_its_slot() -> None:
    slots = Slots(4)
    assert slots.write([7, 8, 9], [0, 128, 0]) == [0, 1]
    assert slots.write([7, 8, 9], [0, 128, 0]) == [
        0,
        1,
    ]  # as layers with another table of rings ask
    assert (slots.of(7), slots.of(9)) == (0, 1)
    assert slots.write([9], [0]) == [1]  # written anew
    with pytest.raises(KeyError):
        slots.of(8)


def test_a_slot_is_given_out_again() -> None:
    slots = Slots(1)
    slots.write([1, 2, 3], [0, 0, 0])
    assert slots.write([2, 5], [128, 0]) == [1]  # page 2 is a second one now, and page 5 a first
    assert slots.write([6], [0]) == [3]
    assert [slots.of(page) for page in (1, 3, 5, 6)] == [0, 2, 1, 3]
