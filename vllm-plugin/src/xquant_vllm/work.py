"""What a connector keeps in mind of requests, and what its scheduler has its worker do."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from xquant.serve.recode import Stored


@dataclass
class Part:
    """What layers with sliding windows or states have of a block."""

    name: str
    pages: list[int]
    """In each group of such layers."""
    stored: list[Stored] = field(default_factory=list)
    """What was read of every shard; to be written to the pages."""
    begins: list[int] = field(default_factory=list)
    """Pages from which the step reads states, to be written, too: vLLM copied the others before it loads."""


@dataclass
class Load:
    """Blocks to be written to pages: of each its name, what was read of every shard, the position that it
    starts at, and the ids of all its tokens."""

    names: list[str]
    stored: list[list[Stored]]
    pages: list[int]
    starts: list[int]
    ids: list[int]
    parts: list[Part]


@dataclass
class Save:
    """The blocks of a sequence, from the first on: their names, the pages in which they are, and the ids of
    all tokens of them."""

    names: list[str]
    pages: list[int]
    ids: list[int]
    parts: list[Part]


@dataclass
class Work(KVConnectorMetadata):
    """What the worker is to do in a step."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)


@dataclass
class Running:
    """A request that the scheduler runs."""

    request: Any
    root: bytes | None
    """What its blocks have in common with others that can be read in their place: the engine, and its
    adapter. None: that cannot be told, and it is neither found nor stored."""
    pages: list[list[int]] = field(default_factory=list)
    """In each of vLLM's groups of layers."""
    saved: int = 0
    """Its blocks that are stored, or were loaded."""
    looked_for: bool = False
    """Whether its blocks were looked for in the folder."""

    @property
    def hashes(self) -> Sequence[bytes]:
        """vLLM's, of all tokens before the end of each block."""
        return [] if self.root is None else self.request.block_hashes

    def names(self, first: int, stop: int, kind: bytes = b"") -> list[str]:
        """Of its blocks; ``kind`` tells apart what is stored of one."""
        root = (self.root or b"") + kind
        return [hashlib.sha256(root + bytes(each)).hexdigest() for each in self.hashes[first:stop]]


@dataclass
class Found:
    """What was read of the folder for a request, until it has pages. vLLM 0.32 ends the engine where a block
    that was found is not loaded, if layers have more than one kind of cache, as pages and rings are. So what
    is found is held."""

    request: str = ""
    first: int = 0
    """The first of these blocks."""
    stored: list[list[Stored]] = field(default_factory=list)
    """Of each block, by shard."""
    parts: list[list[Stored]] = field(default_factory=list)
    """Of the last of these blocks, what layers with sliding windows or states have."""
