"""Codes of which some tokens of a block have more bits than others.

What the error of a token costs differs from token to token by more than what its numbers vary. So the tokens
of a block are put into classes of one size, the costliest first, and each class is stored as a block of its
own, with its own share of the bits. Which class a token is in is stored beside the codes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .pack import pack, packed_rows, unpack
from .quantizer import Field, Packed, Quantizer, dense
from .ranked import Ranked
from .streams import Streams

Pack = Callable[[Ranked, Tensor, Tensor | None], Packed]
Unpack = Callable[[Ranked, Packed, Tensor], None]


@dataclass(frozen=True, eq=False)
class Classed(Quantizer):
    """Ranked codes of each of several classes of tokens.

    Args:
        parts: the quantizer of each class, the costliest first. All have the same `Ranked.costs`, by which
            tokens are sorted.
    """

    parts: tuple[Ranked, ...]

    @property
    def channels(self) -> int:
        return self.parts[0].channels

    def encode(self, x: Tensor, excluded: Tensor | None) -> Packed:
        return self.encode_with(Ranked.encode, x, excluded)

    def encode_with(self, encode: Pack, x: Tensor, excluded: Tensor | None) -> Packed:
        """`encode`, each class by ``encode``."""
        chosen = by_cost(self.parts[0].cost(x, excluded), excluded, len(self.parts))
        classes = torch.empty(x.shape[:2], dtype=torch.uint8, device=x.device)
        packed: Packed = {}
        for number, (part, tokens) in enumerate(zip(self.parts, chosen, strict=True)):
            classes.scatter_(1, tokens, number)
            own = x.gather(1, tokens[..., None].expand(-1, -1, x.shape[2]))
            hidden = None if excluded is None else excluded.gather(1, tokens)
            found = encode(part, own, hidden) if own.shape[1] else _nothing(part, own)
            packed |= {f"{name}_{number}": field for name, field in found.items()}
        packed["class"] = pack(classes[..., None], self._class_bits).squeeze(2)
        return packed

    def decode(self, packed: Packed, out: Tensor) -> None:
        self.decode_with(Ranked.decode, packed, out)

    def decode_with(self, decode: Unpack, packed: Packed, out: Tensor) -> None:
        """`decode`, each class by ``decode``."""
        _, tokens, channels = out.shape
        classes = unpack(dense(packed, "class")[..., None], self._class_bits, tokens).squeeze(2)
        order = classes.sort(stable=True, dim=1).indices
        sizes = shares(tokens, len(self.parts))
        rows = torch.empty_like(out, memory_format=torch.contiguous_format)
        for number, (part, own) in enumerate(zip(self.parts, rows.split(sizes, 1), strict=True)):
            fields = {name: packed[f"{name}_{number}"] for name in part.fields(1, channels)}
            if own.shape[1]:
                decode(part, fields, own)
        out.scatter_(1, order[..., None].expand_as(out), rows)

    @property
    def _class_bits(self) -> int:
        return class_bits(len(self.parts))

    def fields(self, tokens: int, channels: int) -> dict[str, Field]:
        """Those of each class, their names ending with its number, and ``class``, uint8: the class of every
        token."""
        sizes = shares(tokens, len(self.parts))
        found = {
            f"{name}_{number}": field
            for number, (part, own) in enumerate(zip(self.parts, sizes, strict=True))
            for name, field in part.fields(own, channels).items()
        }
        return found | {"class": Field((packed_rows(tokens, self._class_bits),), torch.uint8, "ranges")}

    def streams(self, field: str, tokens: int) -> Streams:
        name, _, number = field.rpartition("_")
        if not name:
            return Streams()
        return self.parts[int(number)].streams(name, shares(tokens, len(self.parts))[int(number)])

    @property
    def tables(self) -> list[Tensor]:
        return [table for part in self.parts for table in part.tables]


def class_bits(classes: int) -> int:
    """Bits that say which class a token is in."""
    return max((classes - 1).bit_length(), 1)


def class_nbytes(tokens: int, classes: int) -> int:
    """Bytes of the classes of a block."""
    return packed_rows(tokens, class_bits(classes))


def shares(tokens: int, classes: int) -> list[int]:
    """How many tokens of a block each class has; the last have one more where they differ."""
    ends = [tokens * number // classes for number in range(classes + 1)]
    return [end - start for start, end in pairwise(ends)]


def by_cost(costs: Tensor, excluded: Tensor | None, classes: int) -> Sequence[Tensor]:
    """The tokens of each class, int64 ``[N, n / classes]``, in their order. Of equal costs ``[N, n]`` the
    first token has the higher class. What is ``excluded`` costs least."""
    costs = costs.float()
    if excluded is not None:
        costs = costs.masked_fill(excluded, -torch.inf)
    order = costs.sort(stable=True, dim=1, descending=True).indices
    return [own.sort(1).values for own in order.split(shares(costs.shape[1], classes), 1)]


def _nothing(part: Ranked, rows: Tensor) -> Packed:
    """What is stored of blocks without tokens."""
    fields = part.fields(0, part.channels)
    return {name: field.empty(len(rows), rows.device).zero_() for name, field in fields.items()}
