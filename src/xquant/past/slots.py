"""Sinks of an engine's sequences: their first tokens, kept as they are beside the pages.

Only the first page of a sequence has sinks, so pages have no room for them. They lie in *slots*, rows of a
tensor a layer: one slot for every first page. A page finds its slot by its number, so sequences that share
their first page share its sinks, and those of a page that is kept for later are kept with it.
"""

from collections.abc import Sequence

from .noted import Noted
from .sequences import Numbers


class Slots:
    """Which pages have sinks, and where; the same for all layers of an engine.

    Args:
        sink: tokens of a slot.
    """

    def __init__(self, sink: int) -> None:
        self.sink = sink
        self._of_page: dict[int, int] = {}
        self._there = Noted(1)  # the same, where kernels read
        self._free: list[int] = []

    def write(self, pages: Sequence[int], starts: Sequence[int]) -> list[int]:
        """Blocks that start at these positions are written to these pages. A page that holds no first block
        any longer gives its slot back. Returns the slots of those that do; asked again, the same ones."""
        for page, start in zip(pages, starts, strict=True):
            if start and page in self._of_page:
                self._free.append(self._of_page.pop(page))
        return [self._slot(page) for page, start in zip(pages, starts, strict=True) if not start]

    def of(self, page: int) -> int:
        """The slot of a first page that was written."""
        return self._of_page[page]

    def of_pages(self, pages: Numbers) -> Numbers:
        """int32 ``[B]``: the slots of these ``pages`` ``[B]``, where these are; any of one that has none."""
        return self._there.of(pages)[:, 0]

    def _slot(self, page: int) -> int:
        if page not in self._of_page:
            free = self._free.pop() if self._free else len(self._of_page)
            self._of_page[page] = free
            self._there.note(page, free)
        return self._of_page[page]
