"""GrowingPast: what one layer keeps of its tokens, the same for every method.

Tokens live in three places: whole blocks are sealed in the stream, the newest are kept as they are in
the tail, and sinks, once sealed, are kept as they are beside their block.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..methods import AttentionInputs, LayerCodec, Method
from ..quant import Packed
from . import finite
from .built import BuiltTail
from .layer import other_dtype
from .packer import Packer
from .pass_state import PassState
from .rows import GrowingRows
from .sealing import pack, seal
from .sinks import Sinks
from .stream import State as StreamState
from .stream import Stream
from .tokens import TokenIndex

State = tuple[Tensor | None, Tensor | None, Sinks | None, StreamState]


class Accumulator(Protocol):
    """Adds what a layer stores to what the layers below it have accumulated; a backend may bring one."""

    def accumulate(self, below: Tensor | None) -> Tensor:
        """What the layer recalls of its sealed tokens ``[B, T, W]``, sinks exact: `LayerCodec.recall`.

        ``below``: the same of the layer below, whose memory may be used for the result.
        """
        ...


class GrowingPast:
    """The compressed past of one layer.

    Args:
        codec: how the method stores this layer.
        method: its options.
        index: positions, padding and sinks, shared by the layers of a cache.
        through_store: every token reads the store, itself included (``attend="store"``); otherwise
            the tokens of one forward pass attend to each other's exact states.
        below: the compressed layer below, for methods that predict across layers.
        packer: what packs and unpacks blocks.
    """

    def __init__(
        self,
        codec: LayerCodec,
        method: Method,
        index: TokenIndex,
        through_store: bool,
        below: "GrowingPast | None",
        packer: Packer,
    ) -> None:
        self.codec, self.method, self.index = codec, method, index
        self.through_store, self.below = through_store, below
        self.stream = Stream(codec.segments, method.group, packer)
        self.span: Sequence[GrowingPast] = (self,)
        self.source: GrowingPast | None = None
        self.accumulator: Accumulator | None = None
        self.built, self._rows = BuiltTail(codec), GrowingRows()
        self.reset()

    @staticmethod
    def link(layers: "Sequence[GrowingPast]") -> None:
        """Join the layers that are sealed together, and tell those that share codes their source layer."""
        start = 0
        while start < len(layers):
            codec = layers[start].codec
            span = layers[start : start + codec.span]
            for layer in span:
                layer.span = span
                if codec.coded_together:
                    layer.below = span[0].below
                if any(segment.shared for segment in layer.codec.segments):
                    layer.source = span[codec.source]
                    layer.stream.source = layer.source.stream
            start += codec.span

    def reset(self) -> None:
        """Forget all tokens."""
        self.stream.reset()
        self._hold(None)
        self.built.forget()
        self.sinks: Sinks | None = None  # once a block was sealed
        self.release()

    def _hold(self, tail: Tensor | None) -> None:
        """Have other recent tokens than those that were added last, ``[B, t, W]``."""
        self.tail = tail
        self._rows.forget()

    def snapshot(self) -> State:
        """What `restore` needs to bring back the tokens of now; copies nothing."""
        return self.tail, self.built.states, self.sinks, self.stream.snapshot()

    def restore(self, state: State) -> None:
        """Hold what it held at the time of a `snapshot`, to the bit."""
        tail, built, self.sinks, stream = state
        self._hold(tail)
        self.built.restore(built)
        self.stream.restore(stream)
        self.release()

    def release_below(self) -> None:
        """Have the layer below forget what this one, the last that asked for it, was predicted from."""
        if self.below is not None and self is self.span[-1]:
            self.below.release()

    def release(self) -> None:
        """Forget what is only needed within a forward pass."""
        self.of_pass = PassState()

    # -- sizes ---------------------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """Of each sequence."""
        return self.stream.tokens + (0 if self.tail is None else self.tail.shape[1])

    @property
    def due(self) -> int:
        """Whole blocks of the tail that need not stay there."""
        length = 0 if self.tail is None else self.tail.shape[1]
        return max((length - max(self.method.tail, self.index.newest)) // self.stream.block, 0)

    @property
    def sink_nbytes(self) -> int:
        return 0 if self.sinks is None else self.sinks.nbytes

    @property
    def tail_nbytes(self) -> int:
        return 0 if self.tail is None else self.tail.nbytes + self.built.nbytes

    # -- appending and sealing -----------------------------------------------------------------

    def append(self, inputs: AttentionInputs, hold: bool = False) -> None:
        """Add new tokens, and seal what has become whole blocks; ``hold`` leaves that to the end of
        the forward pass, where nothing in it reads their codes.

        Raises:
            ValueError: the states hold NaN or infinities; nothing was added. Where the host does not ask at
                once, they may be those of earlier tokens; nothing was sealed.
        """
        self.append_rows(self.codec.features(inputs), hold)
        assert self.tail is not None
        self.built.see(inputs, self.tail.shape[1])

    def append_rows(self, rows: Tensor, hold: bool = False) -> None:
        """The same, given the features ``[B, t, W]`` of the tokens."""
        if self.tail is not None and rows.dtype != self.tail.dtype:
            rows = self._widened(rows, self.tail.dtype)
        if self._asks_at_once(rows.device):
            finite.check_rows(rows, self.codec.view.index)
        self.release()
        self.tail = self._rows.extended(self.tail, rows)
        if self.through_store and self.method.tail:
            self.of_pass.fresh = self.tail
        read = self.through_store or self.codec.reads_below or self.codec.feeds_above
        sealing = (read or not hold) and self is self.span[-1] and self.due > 0
        if sealing:
            GrowingPast.check_finite(self.span, self.tokens - rows.shape[1])
            seal(self.span)
        self.accumulate(sealing or self.through_store)

    def _widened(self, rows: Tensor, held: torch.dtype) -> Tensor:
        """Rows in the model's own dtype, where autocast began after the first passes or a conversion.

        Raises:
            ValueError: the cache holds another dtype than the model's, or a narrower one than the rows'.
        """
        if held == self.codec.view.dtype == torch.promote_types(rows.dtype, held):
            return rows.to(held)
        raise other_dtype(self.codec.view.index, rows.dtype, held, "use a new cache")

    def _asks_at_once(self, device: torch.device) -> bool:
        """Whether rows must be finite before they are kept; see `finite`."""
        # What reads the store packs the tail in every forward pass.
        return self.through_store or finite.asked_at_once(device)

    @staticmethod
    def check_finite(layers: "Sequence[GrowingPast]", before: int) -> None:
        """Ask about the tails of ``layers`` that were not asked about when rows came; see
        `finite.check_tails`."""
        finite.check_tails(
            {
                layer.codec.view.index: layer.tail
                for layer in layers
                if layer.tail is not None and not layer._asks_at_once(layer.tail.device)
            },
            layers[0].tokens,
            before,
        )

    def oldest(self, blocks: int) -> Tensor:
        """The first ``blocks`` of the tail, ``[B, m, n, W]``."""
        assert self.tail is not None
        size = self.stream.block
        return self.tail[:, : blocks * size].unflatten(1, (blocks, size))

    def encode(self, rows: Tensor, start: int) -> Tensor:
        """What is packed of the features ``[B, m, n, W]`` of tokens from ``start`` on: ``[B m, n, C]``."""
        shape = rows.shape[1:3]
        predicted = self._predict(start, start + shape.numel())
        if predicted is not None:
            if self.accumulator is None:  # what recalls these tokens next asks for it again
                self.of_pass.predicted.append((start, predicted))
            predicted = predicted.unflatten(1, shape)
        return self.codec.encode(rows, predicted).flatten(0, 1)

    def settle(self, packed: list[Packed]) -> None:
        """Keep ``packed`` in place of the blocks of the tail that are due, and their sinks as they are."""
        assert self.tail is not None
        start, count = self.stream.tokens, self.due * self.stream.block
        rows = self.tail[:, :count]
        if self.index.sinks and self.index.excluded(start, start + count) is not None:
            own = self.index.sinks, rows, self.codec.sink_dtype
            sinks = self.sinks or Sinks.none_yet(*own)
            self.sinks = sinks.kept(rows, start, self.index.sink)
        self.stream.seal(packed, self.tail.shape[0])
        if self.of_pass.sealed_from is None:
            self.of_pass.sealed_from = start
        self.span[0].of_pass.decoded = None
        self._hold(self.tail[:, count:].clone())  # a view would keep the sealed rows alive
        self.built.drop(count)

    # -- recalling -----------------------------------------------------------------------------

    def recall(self, tokens: int | None = None, sealing: bool = False) -> Tensor | None:
        """What the codec recalls of the first ``tokens`` sealed tokens (all by default); ``sealing``: see
        `LayerCodec.recall`.

        With ``through_store`` the tail follows, as it would read once sealed.
        """
        sealed = self.stream.tokens if tokens is None else min(tokens, self.stream.tokens)
        if self.accumulator is not None and sealed == self.stream.tokens:
            return self.accumulator.accumulate(self._take_below()) if sealed else None
        dtype = self.codec.view.dtype
        parts = [self._read(dtype, sealed)] if sealed else []
        if self.through_store and self.tail is not None and self.tail.shape[1]:
            parts.append(self._through(self.tail))
        if not parts:
            return None
        rows = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        # The layer above makes codes from what is sealed in this pass. What was there before is only read.
        first = self.of_pass.sealed_from or 0 if sealing else rows.shape[1]
        recalled = []
        if first:
            recalled.append(self.codec.recall(rows[:, :first], self._predict(0, first, sealing=False), False))
        if first < rows.shape[1]:
            recalled.append(self.codec.recall(rows[:, first:], self._predicted(first, rows.shape[1])))
        return torch.cat(recalled, 1) if len(recalled) > 1 else recalled[0]

    def _read(self, dtype: torch.dtype, tokens: int) -> Tensor:
        """The decoded rows ``[B, T, C]`` of the first ``tokens`` sealed tokens; where layers are coded
        together, those of all layers of the span side by side, kept until all have asked for them."""
        if not self.codec.coded_together:
            return self.stream.read(dtype, tokens)
        first, home = self.span[0], self.codec.view.device
        if first.of_pass.decoded is None or first.of_pass.decoded.shape[1] < tokens:
            parts = [one.stream.read(dtype, tokens).to(home) for one in self.span]
            first.of_pass.decoded = torch.cat(parts, -1)
        decoded = first.of_pass.decoded.to(home)
        if self is self.span[-1]:
            first.of_pass.decoded = None
        return decoded[:, :tokens]

    def _predict(self, start: int, stop: int, sealing: bool = True) -> Tensor | None:
        """What the codec predicts these tokens to be, from the layer below and from their ids; ``sealing``:
        see `LayerCodec.predicted`."""
        embedded = self.index.embedded(start, stop, self.codec.view.dtype)
        if embedded is not None:
            embedded = embedded.to(self.codec.view.device)
        return self.codec.predicted(self._below(start, stop), embedded, sealing)

    def _predicted(self, first: int, stop: int) -> Tensor | None:
        """What tokens ``first`` to ``stop - 1`` are predicted to be, to make codes from."""
        held, self.of_pass.predicted = self.of_pass.predicted, []
        # What was encoded in this pass are the newest tokens, one part after the other.
        start = min((start for start, _ in held), default=stop)
        parts = [part for _, part in held]
        if first < start:
            older = self._predict(first, start)
            if older is None:
                return None
            parts.insert(0, older)
        return (torch.cat(parts, 1) if len(parts) > 1 else parts[0])[:, : stop - first]

    def accumulate(self, sealing: bool = False) -> None:
        """Recall what is stored, where the layer above needs it; ``sealing``: to make codes from."""
        if self.codec.feeds_above:
            self.of_pass.recalled = self.recall(sealing=sealing)
            self.of_pass.accumulated = self._accumulated(self.of_pass.recalled)

    def _accumulated(self, recalled: Tensor | None) -> Tensor | None:
        """What the layer above predicts from: sinks are exact there too."""
        if recalled is None:
            return None
        own = self.codec.accumulate(recalled)
        if self.accumulator is not None and own is recalled:
            return recalled  # sinks are in it
        if self.sinks is not None:
            own = self.sinks.placed(own, self._sinks_of(own.shape[-1]))
        if self.through_store and self.tail is not None:
            own = self._with_tail_sinks(own, self.tail)
        further = self.codec.above_width > own.shape[-1]
        return self.codec.accumulated_above(own, self._below(0, own.shape[1]) if further else None)

    def _sinks_of(self, width: int) -> Tensor:
        """The features of sinks ``[B, S, width]``, of this layer and of those before it in its span."""
        rows: list[Tensor] = []
        for layer in self.span[::-1]:
            if sum(part.shape[-1] for part in rows) < width:
                assert layer.sinks is not None
                rows.append(layer.sinks.rows.to(self.codec.view.device))
        return torch.cat(rows, -1) if len(rows) > 1 else rows[0]

    def _below(self, start: int, stop: int) -> Tensor | None:
        """What the layer below has accumulated of these tokens, where this one predicts from it."""
        if not self.codec.reads_below:
            return None
        assert self.below is not None
        if self.below.of_pass.accumulated is None:  # asked for outside a forward pass
            self.below.accumulate(sealing=True)
            if self.below.below is not None:
                self.below.below.release()
        accumulated = self.below.of_pass.accumulated
        assert accumulated is not None
        return accumulated[:, start:stop].to(self.codec.view.device)

    def _take_below(self) -> Tensor | None:
        """The same of all sealed tokens; its memory is the caller's from then on."""
        found = self._below(0, self.stream.tokens)
        if found is not None:
            self.release_below()
        return found

    def _through(self, tail: Tensor) -> Tensor:
        """``tail`` ``[B, t, W]`` as it will read once sealed, decoded to ``[B, t, C]``.

        It is cut into blocks from the first row on; the last may be shorter.
        """
        rows = []
        for at in range(0, tail.shape[1], self.stream.block):
            packed = self._pack_part(tail, at)
            if self.source is not None:
                assert self.source.tail is not None
                packed = self.stream.with_shared_codes(packed, self.source._pack_part(self.source.tail, at))
            tokens = min(self.stream.block, tail.shape[1] - at)
            rows.append(self.stream.unpack(packed, tokens, tail.dtype))
        return torch.cat(rows, 1)

    def _pack_part(self, tail: Tensor, at: int) -> list[Packed]:
        """The block of ``tail`` from ``at`` on, packed but not sealed."""
        part = tail[:, at : at + self.stream.block].unsqueeze(1)
        return pack([self], [part], self.stream.tokens + at)[0]

    def _with_tail_sinks(self, rows: Tensor, exact: Tensor) -> Tensor:
        """``rows`` ``[B, T, .]`` with the sinks of the tail as in ``exact`` ``[B, t, .]``."""
        start = self.stream.tokens
        keep = self.index.sink[:, start : start + exact.shape[1], None].to(rows.device)
        return torch.cat([rows[:, :start], torch.where(keep, exact, rows[:, start:])], 1)

    # -- the batch and the length --------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``abs(tokens_to_remove)`` tokens. Sealed codes that stay are not touched."""
        if self.tail is None:
            return
        keep = max(self.tokens - abs(tokens_to_remove), 0)
        if keep == 0:
            return self.reset()
        tail = self.tail[:, : max(keep - self.stream.tokens, 0)].clone()
        self._hold(tail)
        self.built.cut(tail.shape[1])
        self.stream.crop(keep)
        if self.sinks is not None:
            self.sinks = self.sinks.cropped(keep)
        self.release()

    def select(self, indices: Tensor) -> None:
        """Keep (or reorder, or repeat) the sequences ``indices``."""
        if self.tail is None:
            return
        self.stream.select(indices)
        self._hold(self.tail[indices.to(self.tail.device)])
        self.built.select(indices)
        if self.sinks is not None:
            self.sinks = self.sinks.selected(indices)
        self.release()
