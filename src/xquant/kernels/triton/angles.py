"""Rotary angles as the Triton kernels take them: `..angles` without asking the device for anything."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...store.tokens import TokenIndex
from ..rope import Pair, starts

ALIGNED = 64
"""Numbers, of which rooms are multiples."""


@dataclass
class Turns:
    """Of the tokens of one layer in one forward pass; cos and sin, fp32, of half the head size."""

    turn: Pair  # [n, D/2] from the start of a block
    start: Pair  # [B, columns, D/2]
    tail: Pair  # [B, t, D/2]
    sinks: Pair  # [B, S, D/2]


class TurnBook:
    """What the layers of a cache share: the angles of one forward pass, computed once for those that hold the
    same tokens, and room for what the programs of a kernel leave to be joined."""

    def __init__(self, index: TokenIndex) -> None:
        self._index = index
        self._room: dict[torch.device, Tensor] = {}
        self._starts: dict[tuple[int, int, int], Tensor | None] = {}
        self.clear()

    def clear(self) -> None:
        """Forget what holds for one forward pass only."""
        self._found: dict[tuple[int, int], Turns | None] = {}

    def of(self, lengths: list[int], block: int, tail: int, sinks: Tensor | None) -> Turns | None:
        """As `AngleBook.of`."""
        if not self._index.uniform:
            return None
        key = sum(lengths), tail
        if key not in self._found:
            begin = self._start(lengths)
            self._found[key] = (
                None if begin is None else self._compute(begin, sum(lengths), block, tail, sinks)
            )
        return self._found[key]

    def _start(self, lengths: list[int]) -> Tensor | None:
        # The only question to the device, once for every block that is sealed.
        key = self._index.epoch, sum(lengths), len(lengths)
        if key not in self._starts:
            if len(self._starts) > 1:  # layers of one cache may differ by one block
                self._starts.pop(next(iter(self._starts)))
            self._starts[key] = starts(self._index, lengths)
        return self._starts[key]

    def _compute(
        self, begin: Tensor, sealed: int, block: int, tail: int, sinks: Tensor | None
    ) -> Turns:
        positions = self._index.positions
        batch, device = len(positions), positions.device
        kept = positions[:, :0]
        if sinks is not None:
            kept = positions.gather(1, sinks.to(device).long().clamp(min=0))
        within = torch.arange(block, dtype=positions.dtype, device=device).expand(batch, -1)
        parts = [begin, positions[:, sealed : sealed + tail], kept, within]
        cos, sin = self._index.rope_at(torch.cat(parts, 1))
        half, sizes = cos.shape[-1] // 2, [part.shape[1] for part in parts]
        pairs: list[Pair] = [
            (c.contiguous(), s.contiguous())
            for c, s in zip(
                cos[..., :half].split(sizes, 1), sin[..., :half].split(sizes, 1), strict=True
            )
        ]
        start, newest, kept_pair, (turn_cos, turn_sin) = pairs
        # Some embeddings scale what they turn: that is left to the start of the block.
        factor = turn_cos[0, 0, 0]
        return Turns((turn_cos[0] / factor, turn_sin[0] / factor), start, newest, kept_pair)

    def room(self, device: torch.device, *sizes: int) -> list[Tensor]:
        """Room for runs of fp32 numbers of these ``sizes``, at least. Every layer takes it again: one stream
        runs them one after the other."""
        # Each begins where a kernel may load 16 bytes at once.
        whole = [-(-size // ALIGNED) * ALIGNED for size in sizes]
        room, wanted = self._room.get(device), sum(whole)
        if room is None or len(room) < wanted:
            # Twice what is asked for: it grows with the context, a part at a time.
            room = self._room[device] = torch.empty(2 * wanted, device=device)
        return list(room[:wanted].split(whole))
