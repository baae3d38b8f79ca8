"""For pytest: keeps calls of the native library, and all memory that they reach, before and after.

    PYTHONPATH=tests XQUANT_RECORD=FILE python -m pytest -p support.recorded_calls tests/kernels

`tests/kernels/replay.cpp` makes the same calls with another library, and compares that memory. It needs no
Python. Of each test the first call of each function is kept, with AVX2, if it reaches no more than `LARGEST`.

What a call reaches is found without knowing its structure: numbers in it that are addresses in a tensor, and
such numbers in tensors of int64, where addresses of blocks are. Each is kept as a place to be set anew.

In the file a call is ``CALL``; int32 lengths of its function's name, its test and its structure, and what it
returned; these three; int32 counts of regions and of addresses. A region is its int64 size, int32 whether it
changed, the bytes before, and those after if it did. An address is int32 the region where it stands (-1: the
structure), int64 where in it, int32 the region to which it points, int64 where in that.
"""

import ctypes
import gc
import os
import struct
from collections.abc import Callable, Iterator
from typing import BinaryIO, NamedTuple

import numpy as np
import pytest
import torch

from xquant.kernels.cpu import library

LARGEST = 6_000_000
FOUND_NAN = 1


class Region(NamedTuple):
    """Memory of tensors."""

    start: int
    size: int
    has_addresses: bool

    def read(self) -> bytes:
        return ctypes.string_at(self.start, self.size)


class Address(NamedTuple):
    """Where one is, and what it points to; regions by their number, -1 is the structure."""

    region: int
    offset: int
    to_region: int
    to_offset: int


def tensors() -> list[Region]:
    """The memory of all tensors on the CPU, in order, with what overlaps as one."""
    found = set()
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and each.is_cpu and each.layout is torch.strided:
            storage = each.untyped_storage()
            found.add((storage.data_ptr(), storage.nbytes(), each.dtype == torch.int64))
    merged: list[Region] = []
    for start, size, has_addresses in sorted(found):
        if merged and start < merged[-1].start + merged[-1].size:
            before = merged.pop()
            size = max(before.start + before.size, start + size) - before.start
            start, has_addresses = before.start, before.has_addresses or has_addresses
        if size:
            merged.append(Region(start, size, has_addresses))
    return merged


def reached_from(structure: bytes) -> tuple[list[Region], list[Address]]:
    """What a call with this structure may read or write."""
    known = tensors()
    starts = np.array([region.start for region in known], dtype=np.uint64)
    reached: list[Region] = []
    addresses: list[Address] = []

    def follow(memory: bytes, number: int) -> None:
        words = np.frombuffer(memory[: len(memory) // 8 * 8], dtype=np.uint64)
        at = np.searchsorted(starts, words, "right").astype(int) - 1
        for i in np.nonzero(at >= 0)[0]:
            region, offset = known[at[i]], int(words[i]) - known[at[i]].start
            if offset >= region.size:
                continue
            if region not in reached:
                reached.append(region)
            addresses.append(Address(number, int(i) * 8, reached.index(region), offset))

    follow(structure, -1)
    for number, region in enumerate(reached):  # which grows
        if region.has_addresses:
            follow(region.read(), number)
    return reached, addresses


class Recorder:
    """Stands in for `library.function`."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._function = library.function
        self._seen: set[tuple[str, str]] = set()

    def function(self, name: str, isa: str) -> Callable[[ctypes.Structure], None]:
        call = self._function(name, isa)

        def recorded(given: ctypes.Structure) -> None:
            test = os.environ.get("PYTEST_CURRENT_TEST", "")
            if isa != "avx2" or (test, name) in self._seen:
                return call(given)
            structure = bytes(given)
            reached, addresses = reached_from(structure)
            if sum(region.size for region in reached) > LARGEST:
                return call(given)
            self._seen.add((test, name))
            before, returned = [region.read() for region in reached], 0
            try:
                call(given)
            except ValueError:
                returned = FOUND_NAN
                raise
            finally:
                texts = name.encode(), test.encode(), structure
                self._file.write(b"CALL" + struct.pack("<4i", *map(len, texts), returned) + b"".join(texts))
                self._file.write(struct.pack("<2i", len(reached), len(addresses)))
                for region, was in zip(reached, before, strict=True):
                    now = region.read()
                    self._file.write(struct.pack("<qi", region.size, now != was) + was)
                    self._file.write(now if now != was else b"")
                self._file.writelines(struct.pack("<iqiq", *address) for address in addresses)
            return None

        return recorded


@pytest.fixture(scope="session", autouse=True)
def _recorded() -> Iterator[None]:
    with open(os.environ["XQUANT_RECORD"], "wb") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "function", Recorder(file).function)
        yield
