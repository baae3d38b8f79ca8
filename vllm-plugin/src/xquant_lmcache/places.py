"""Places: which tokens of a text a chunk has, as LMCache's server tells it when the chunk is stored.

An object's key has the hash of all tokens up to its end, and neither their ids nor where they stand. The
server publishes both, in the mode in which LMCache itself moves states, just before a chunk is stored.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from lmcache.v1.mp_observability.event import EventType
from lmcache.v1.mp_observability.event_bus import get_event_bus

MOST = 65536
"""Chunks that are known at a time."""
PATIENCE = 2.0
"""Seconds that a chunk is waited for: the bus hands on what it is given in a thread of its own."""


class Place(NamedTuple):
    """Of a chunk."""

    start: int
    """The position of its first token."""
    ids: Sequence[int]


class Places:
    """Listens to the server of this process."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, Place] = OrderedDict()
        self._changed = threading.Condition()
        get_event_bus().subscribe(EventType.MP_TOKENS, self.note)

    def note(self, event: Any) -> None:
        """Take what the server published of the chunks of a request."""
        told = event.metadata
        each = zip(told["chunk_hashes"], told["token_offsets"], told["token_chunks"], strict=True)
        with self._changed:
            for name, start, ids in each:
                self._known[bytes(name)] = Place(int(start), ids)
                self._known.move_to_end(bytes(name))
            while len(self._known) > MOST:
                self._known.popitem(last=False)
            self._changed.notify_all()

    def of(self, name: bytes) -> Place | None:
        """The place of a chunk of this hash; None where it was not told."""
        with self._changed:
            self._changed.wait_for(lambda: bytes(name) in self._known, PATIENCE)
            return self._known.get(bytes(name))
