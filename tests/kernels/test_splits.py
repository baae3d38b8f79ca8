"""How blocks are split over programs, and how many of these a GPU runs at once."""

import pytest

from xquant.kernels.splits import Limits, blocks_per_split

HOPPER = Limits(multiprocessors=132, warp=32, threads=2048, registers=1 << 16, shared=228 << 10)


@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("batch", range(1, 33))
def test_a_gpu_is_busy_at_every_batch(batch: int, at_once: int) -> None:
    """Of Llama-3.1-8B at 32K tokens: 8 key/value heads, 256 blocks."""
    columns, programs, slots = 256, 8 * batch, 132 * at_once
    each = blocks_per_split(columns, programs, slots)
    waves = -(-programs * -(-columns // each) // slots)
    assert columns * programs / (waves * slots * each) >= 0.85


@pytest.mark.parametrize(
    ("columns", "programs", "slots", "expected"),
    [
        (256, 8, 132, 16),  # 16 splits in one wave
        (256, 8, 264, 8),
        (256, 136, 132, 32),  # 9 waves of 8 splits; 17 of 16 would end at the same time
        (256, 264, 132, 256),  # two waves, whatever the splits
        (1, 8, 132, 1),
        (1, 1000, 132, 1),
        (0, 8, 132, 1),
        (100, 1, 1, 100),
    ],
)
def test_blocks_of_a_split(columns: int, programs: int, slots: int, expected: int) -> None:
    assert blocks_per_split(columns, programs, slots) == expected


@pytest.mark.parametrize(
    ("warps", "registers", "shared", "expected"),
    [
        (8, 255, 0, 1),  # 256 are given out
        (4, 255, 0, 2),
        (4, 129, 0, 3),
        (4, 128, 0, 4),
        (4, 32, 100 << 10, 2),
        (4, 32, 113 << 10, 2),  # and 1 KiB that the device takes
        (4, 32, (113 << 10) + 1, 1),
        (8, 32, 0, 8),  # threads
        (1, 16, 0, 32),
        (32, 255, 0, 1),  # what does not fit is not asked about
    ],
)
def test_programs_of_a_multiprocessor(warps: int, registers: int, shared: int, expected: int) -> None:
    assert HOPPER.slots(warps, registers, shared) == 132 * expected
