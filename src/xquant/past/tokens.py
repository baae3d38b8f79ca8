"""The index of a cache: what must be known of every token, once for all layers."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..models.rope import Rope
from ..models.rotation import Pair

RopeSpans = tuple[tuple[int, bool], ...]
"""Of tokens with the frequencies of one set: where each ends, and whether they are those of long inputs."""
State = tuple[Tensor, Tensor, Tensor, RopeSpans, Tensor | None, Tensor]

UNKNOWN = -1
"""The id of a token that was given as an embedding."""


def look_up(embedding: Tensor, ids: Tensor) -> Tensor:
    """Rows of ``embedding`` ``[V, E]`` for ids of any shape ``[...]``, ``[..., E]``; zeros where an id is
    none of these."""
    ids = ids.to(embedding.device)
    known = (ids >= 0) & (ids < len(embedding))
    return embedding[ids.where(known, 0)].masked_fill_(~known[..., None], 0)


def visible(mask: Tensor) -> Tensor:
    """Which query sees which token, bool, by a mask of any shape, bool or added to scores."""
    return mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask.bool()


class TokenIndex:
    """Positions, padding, sinks and ids of ``T`` tokens of ``B`` sequences.

    ``positions`` int32 ``[B, T]``; ``real`` bool ``[B, T]``, False for padding; ``sink`` bool
    ``[B, T]``, True for the first ``sinks`` real tokens of each sequence: with left padding they
    stand in different columns. ``ids`` int32 ``[B, T]``, `UNKNOWN` for tokens that have none.

    Args:
        sinks: of each sequence.
        rope: of the model.
        embedding: what methods know of every token of the vocabulary, ``[V, E]``; None where they know
            nothing.
    """

    def __init__(self, sinks: int, rope: Rope, embedding: Tensor | None = None) -> None:
        self.sinks = sinks
        self._rope, self._embedding = rope, embedding
        self.epoch = 0
        self.newest = 0
        """How many of the newest tokens stay in full, where that is more than the method's ``tail``."""
        self.reset()

    @property
    def takes_axes(self) -> bool:
        """Whether positions of several axes can be told apart; where not, such tokens are refused."""
        return self._rope.takes_axes

    @property
    def axis_count(self) -> int:
        """``N``: how many axes those positions have."""
        return self._rope.axes

    def reset(self) -> None:
        self.epoch += 1  # changes when tokens do, other than at the end
        self.forget()
        self.positions = torch.empty(0, 0, dtype=torch.int32, device="cpu")
        self.real = torch.empty(0, 0, dtype=torch.bool, device="cpu")
        self.sink = torch.empty(0, 0, dtype=torch.bool, device="cpu")
        self.ids = torch.empty(0, 0, dtype=torch.int32, device="cpu")
        self.axes: Tensor | None = None
        """Where some tokens have positions of several axes (images): those of all, int32 ``[N, B, T]``."""
        self.rope_spans: RopeSpans = ()
        """Of a model with two sets of frequencies, see `Rope`; none of any other."""

    def forget(self) -> None:
        """Forget what is only needed within a forward pass."""
        self._angles: Pair | None = None
        self._by_channel: tuple[Tensor, ...] | None = None
        self._by_token: tuple[Tensor, ...] | None = None
        self._excluded: dict[tuple[int, int], Tensor | None] = {}
        self._embedded: Tensor | None = None

    @property
    def length(self) -> int:
        return self.positions.shape[1]

    @property
    def batch(self) -> int:
        return self.positions.shape[0]

    @property
    def nbytes(self) -> int:
        axes = 0 if self.axes is None else self.axes.nbytes
        held = self.positions, self.real, self.sink, self.ids
        return sum(tensor.nbytes for tensor in held) + axes

    def append(
        self,
        positions: Tensor,
        real: Tensor,
        axes: Tensor | None = None,
        ids: Tensor | None = None,
    ) -> None:
        """Add tokens: positions ``[B, t]`` of any integer dtype, ``real`` bool ``[B, t]``, positions
        ``[N, B, t]`` where they are of several axes, and ids ``[B, t]`` where they are known."""
        if axes is not None or self.axes is not None:
            count = self.axis_count
            new = positions.expand(count, -1, -1) if axes is None else axes
            held = self.positions.expand(count, -1, -1) if self.axes is None else self.axes
            self.axes = torch.cat([held, new], 2).int() if self.length else new.int()
        if self.batch == 0:
            empty = positions[:, :0]
            self.positions, self.real, self.sink = empty.int(), empty.bool(), empty.bool()
            self.ids = empty.int()
        rank = real.cumsum(1) + self.real.sum(1, keepdim=True)
        self.positions = torch.cat([self.positions, positions.int()], 1)
        self.real = torch.cat([self.real, real], 1)
        self.sink = torch.cat([self.sink, real & (rank <= self.sinks)], 1)
        if ids is None:
            ids = torch.full_like(positions, UNKNOWN)
        self.ids = torch.cat([self.ids, ids.to(self.ids.device, torch.int32)], 1)
        if self._rope.switches:
            span = self.length, self._rope.is_long(positions)
            before = self.rope_spans
            if before and before[-1][1] == span[1]:
                before = before[:-1]
            self.rope_spans = (*before, span)
        self.forget()

    def take(self, other: "TokenIndex") -> None:
        """Have the tokens of another index of the same model, with sinks of its own."""
        self.give(other.positions, other.real, other.rope_spans, other.ids)
        self.axes = other.axes

    def give(self, positions: Tensor, real: Tensor, spans: RopeSpans, ids: Tensor | None = None) -> None:
        """`append` tokens to none, where the `rope_spans` of their frequencies are known."""
        self.append(positions, real, ids=ids)
        self.rope_spans = spans

    def embedded(self, start: int, stop: int, like: torch.dtype) -> Tensor | None:
        """What methods know of these tokens by their ids, ``[B, stop - start, E]``; zeros of tokens without
        one, or of one that the vocabulary did not have. None where no method asks.

        Looked up once per forward pass for all layers.
        """
        if self._embedding is None:
            return None
        if self._embedded is None or self._embedded.dtype != like:
            self._embedded = look_up(self._embedding, self.ids).to(like)
        return self._embedded[:, start:stop]

    def excluded(self, start: int, stop: int) -> Tensor | None:
        """Tokens that must not set a quantization range (bool ``[B, stop-start]``), None if none.

        The device is asked once per forward pass for all layers.
        """
        if (start, stop) not in self._excluded:
            mask = self.sink[:, start:stop] | ~self.real[:, start:stop]
            self._excluded[start, stop] = mask if bool(mask.any()) else None
        return self._excluded[start, stop]

    @property
    def uniform(self) -> bool:
        """Whether angles follow from positions alone: all tokens have the frequencies of one set, see `Rope`,
        and positions of one axis."""
        return self.axes is None and len({long for _, long in self.rope_spans}) < 2

    @property
    def _long(self) -> bool:
        return bool(self.rope_spans) and self.rope_spans[-1][1]

    def rope(self, like: Tensor) -> Pair:
        """cos and sin of all tokens, ``[B, T, R]`` in the dtype and on the device of ``like``: those that the
        forward pass of each had.

        Computed once per forward pass and shared by the layers; nothing of it stays resident.
        """
        if self._angles is None:
            if self.uniform or self.axes is not None:
                at = self.positions if self.axes is None else self.axes
                self._angles = self._rope(like, at, self._long)
            else:
                starts = (0, *(stop for stop, _ in self.rope_spans))
                parts = [
                    self._rope(like, self.positions[:, start:stop], long)
                    for start, (stop, long) in zip(starts, self.rope_spans, strict=False)
                ]
                cos, sin = (torch.cat(part, 1) for part in zip(*parts, strict=True))
                self._angles = cos, sin
        cos, sin = self._angles
        return cos.to(like.device), sin.to(like.device)

    def rope_of_newest(self, like: Tensor, count: int) -> Pair:
        """cos and sin of the newest ``count`` tokens, ``[B, count, R]`` in the dtype of ``like``."""
        at = self.positions if self.axes is None else self.axes
        return self._rope(like, at[..., self.length - count :], self._long)

    def rope_by_channel(self) -> tuple[Tensor, ...]:
        """The same for kernels: ``[B, R/2, T]`` in fp32, on the CPU."""
        if self._by_channel is None:
            self._by_channel = tuple(t.mT.contiguous() for t in self.rope_by_token())
        return self._by_channel

    def rope_by_token(self) -> tuple[Tensor, ...]:
        """The same, ``[B, T, R/2]``."""
        if self._by_token is None:
            cos, sin = self.rope(self.positions.new_empty(0, dtype=torch.float32))
            half = cos.shape[-1] // 2
            self._by_token = tuple(t[..., :half].float().contiguous() for t in (cos, sin))
        return self._by_token

    def rope_at(self, positions: Tensor) -> Pair:
        """cos and sin of any positions ``[B, t]``, ``[B, t, R]`` in fp32, where tokens are `uniform`."""
        return self._rope(positions.new_empty(0, dtype=torch.float32), positions, self._long)

    def crop(self, length: int) -> None:
        self._each(lambda t: t[..., :length].clone())
        kept = [(min(stop, length), long) for stop, long in self.rope_spans]
        starts = (0, *(stop for stop, _ in kept))
        self.rope_spans = tuple(span for start, span in zip(starts, kept, strict=False) if span[0] > start)

    def snapshot(self) -> State:
        """What `restore` needs to bring back what is known now."""
        return self.positions, self.real, self.sink, self.rope_spans, self.axes, self.ids

    def restore(self, state: State) -> None:
        self.epoch += 1
        self.positions, self.real, self.sink, self.rope_spans, self.axes, self.ids = state
        self.forget()

    def select(self, indices: Tensor) -> None:
        self._each(lambda t: t[..., indices.to(t.device), :])

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        self.epoch += 1
        self.positions, self.real = change(self.positions), change(self.real)
        self.sink, self.ids = change(self.sink), change(self.ids)
        self.axes = None if self.axes is None else change(self.axes)
        self.forget()
