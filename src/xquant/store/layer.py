"""CompressedLayer: one attention layer of the cache, the same for every method.

Tokens live in three places: whole blocks are sealed in the stream, the newest are kept as they are in
the tail, and sinks, once sealed, are kept as they are beside their block.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..methods import LayerCodec, Method, Seen
from ..models.base import rotate
from ..quant import Packed
from . import finite
from .sealing import pack, seal
from .stream import State as StreamState
from .stream import Stream
from .tokens import TokenIndex

if TYPE_CHECKING:
    from ..kernels.triton.accumulate import TritonCarrier

States = tuple[Tensor, Tensor]
State = tuple[Tensor | None, Tensor | None, Tensor | None, StreamState]


class CompressedLayer(CacheLayerMixin):
    """The compressed past of one layer.

    Args:
        codec: how the method stores this layer.
        method: its options.
        index: positions, padding and sinks, shared by the layers of a cache.
        through_store: every token reads the store, itself included (``attend="store"``); otherwise
            the tokens of one forward pass attend to each other's exact states.
        below: the compressed layer below, for methods that predict across layers.
        path: the instruction set of the library that seals blocks; None for torch.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(
        self,
        codec: LayerCodec,
        method: Method,
        index: TokenIndex,
        through_store: bool,
        below: "CompressedLayer | None",
        path: str | None = None,
    ) -> None:
        self.codec, self.method, self.index = codec, method, index
        self.through_store, self.below = through_store, below
        self.stream = Stream(codec.segments, method.group, path)
        self.span: Sequence[CompressedLayer] = (self,)
        self.lender: CompressedLayer | None = None
        self.carrier: TritonCarrier | None = None
        self.reset()

    @staticmethod
    def link(layers: "Sequence[CompressedLayer]") -> None:
        """Join the layers that are sealed together, and lend the codes that some borrow."""
        start = 0
        while start < len(layers):
            codec = layers[start].codec
            span = layers[start : start + codec.span]
            for layer in span:
                layer.span = span
                if any(segment.borrows for segment in layer.codec.segments):
                    layer.lender = span[codec.lender]
                    layer.stream.lender = layer.lender.stream
            start += codec.span

    def reset(self) -> None:
        self.stream.reset()
        self.tail: Tensor | None = None  # [B, t, W]
        self.sinks: Tensor | None = None  # [B, S, W], once a block was sealed
        self.sink_at: Tensor | None = None  # [B, S] column of each sink, -1 where not sealed yet
        self.release()

    def snapshot(self) -> State:
        """What `restore` needs to bring back the tokens of now; copies nothing."""
        return self.tail, self.sinks, self.sink_at, self.stream.snapshot()

    def restore(self, state: State) -> None:
        """Hold what it held at the time of a `snapshot`, to the bit."""
        self.tail, self.sinks, self.sink_at, stream = state
        self.stream.restore(stream)
        self.release()

    def release(self) -> None:
        """Forget what is only needed within a forward pass."""
        self.recalled: Tensor | None = None  # kept only where the layer above needs it
        self.carried: Tensor | None = None
        self.fresh: Tensor | None = None

    # -- sizes ---------------------------------------------------------------------------------

    def get_seq_length(self) -> int:
        return self.stream.tokens + (0 if self.tail is None else self.tail.shape[1])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.13

    @property
    def is_initialized(self) -> bool:
        return self.tail is not None

    @property
    @torch.no_grad()
    def keys(self) -> Tensor | None:
        """Keys of all tokens as attention reads them, decoded, ``[B, G, T, D]``; for tools that look into a
        cache. None where there are no tokens."""
        return None if self.tail is None else self.states()[0]

    @property
    @torch.no_grad()
    def values(self) -> Tensor | None:
        """The same of values."""
        return None if self.tail is None else self.states()[1]

    @property
    def sink_nbytes(self) -> int:
        if self.sinks is None or self.sink_at is None:
            return 0
        return self.sinks.nbytes + self.sink_at.nbytes

    @property
    def tail_nbytes(self) -> int:
        return 0 if self.tail is None else self.tail.nbytes

    # -- writing -------------------------------------------------------------------------------

    def append(self, seen: Seen, hold: bool = False) -> None:
        """Add the tokens just seen, and seal what has become whole blocks; ``hold`` leaves that to the end of
        the forward pass, where nothing in it reads their codes.

        Raises:
            ValueError: the states hold NaN or infinities; nothing was added. Where the host does not ask at
                once, they may be those of earlier tokens; nothing was sealed.
        """
        self.append_rows(self.codec.features(seen), hold)

    def append_rows(self, rows: Tensor, hold: bool = False) -> None:
        """The same, given the features ``[B, t, W]`` of the tokens."""
        before = self.get_seq_length()
        if self.tail is not None and rows.dtype != self.tail.dtype:
            raise ValueError(
                f"layer {self.codec.view.index} gives {rows.dtype} states, and the cache holds"
                f" {self.tail.dtype} ones: the model was cast since; cast it back, or use a new cache"
            )
        if self.asks_at_once(rows.device):
            finite.check_rows(rows, self.codec.view.index)
        self.release()
        # Copies: views would keep the model's activations, or a whole sealed chunk, alive.
        tail = rows.clone() if self.tail is None else torch.cat([self.tail, rows], 1)
        if self.through_store and self.method.tail:
            self.fresh = tail
        self.tail = tail
        read = self.through_store or self.codec.reads_below or self.codec.feeds_above
        sealing = self is self.span[-1] and self.due > 0 and (read or not hold)
        if sealing:
            finite.check_tails(self.span, before)
            seal(self.span)
        self.carry_up(sealing or self.through_store)

    def asks_at_once(self, device: torch.device) -> bool:
        """Whether rows must be finite before they are kept; see `finite`."""
        # What reads the store packs the tail in every forward pass.
        return self.through_store or finite.asked_at_once(device)

    def carry_up(self, sealing: bool = False) -> None:
        """Recall what is stored, where the layer above needs it; ``sealing``: to make codes from."""
        if self.codec.feeds_above:
            self.recalled = self.recall(sealing=sealing)
            self.carried = self._carry(self.recalled)

    def _take_below(self) -> Tensor | None:
        """The memory of what the layer below carries, which is then gone."""
        found = self._below(0, self.stream.tokens)
        if found is not None and self.below is not None:
            self.below.release()
        return found

    @property
    def due(self) -> int:
        """Whole blocks of the tail that need not stay there."""
        length = 0 if self.tail is None else self.tail.shape[1]
        return max((length - self.method.tail) // self.stream.block, 0)

    def encode(self, rows: Tensor, start: int) -> Tensor:
        """What is packed of the features ``[B, m, n, W]`` of tokens from ``start`` on: ``[B m, n, C]``."""
        shape = rows.shape[1:3]
        below = self._below(start, start + shape.numel())
        below = None if below is None else below.unflatten(1, shape)
        return self.codec.encode(rows, below).flatten(0, 1)

    def _below(self, start: int, stop: int) -> Tensor | None:
        if not self.codec.reads_below:
            return None
        assert self.below is not None
        carried = self.below.carried
        if carried is None:  # asked for outside a forward pass
            carried = self.below._carry(self.below.recall(sealing=True))
        assert carried is not None
        return carried[:, start:stop].to(self.codec.view.device)

    def _carry(self, recalled: Tensor | None) -> Tensor | None:
        """What the layer above predicts from: sinks are exact there too."""
        if recalled is None:
            return None
        carried = self.codec.carry(recalled)
        if self.carrier is not None and carried is recalled:
            return recalled  # sinks are in it
        own, further = carried[..., : self.codec.width], carried[..., self.codec.width :]
        own = self._place_sinks(own, self.sinks)
        if self.through_store and self.tail is not None:
            own = self._place_tail_sinks(own, self.tail)
        return torch.cat([own, further], -1) if further.shape[-1] else own

    # -- reading -------------------------------------------------------------------------------

    def recall(self, tokens: int | None = None, sealing: bool = False) -> Tensor | None:
        """What the codec recalls of the first ``tokens`` sealed tokens (all by default); ``sealing``: see
        `LayerCodec.recall`.

        With ``through_store`` the tail follows, as it would read once sealed.
        """
        sealed = self.stream.tokens if tokens is None else min(tokens, self.stream.tokens)
        if self.carrier is not None and sealed == self.stream.tokens:
            return self.carrier.carried(self._take_below()) if sealed else None
        dtype = self.codec.view.dtype
        parts = [self.stream.read(dtype, sealed)] if sealed else []
        if self.through_store and self.tail is not None and self.tail.shape[1]:
            parts.append(self._through(self.tail))
        if not parts:
            return None
        rows = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        return self.codec.recall(rows, self._below(0, rows.shape[1]), sealing)

    def _through(self, tail: Tensor) -> Tensor:
        """``tail`` ``[B, t, W]`` as it will read once sealed, decoded to ``[B, t, C]``.

        It is cut into blocks from the first row on; the last may be shorter.
        """
        rows = []
        for at in range(0, tail.shape[1], self.stream.block):
            packed = self._pack_part(tail, at)
            if self.lender is not None:
                assert self.lender.tail is not None
                packed = self.stream.borrow(packed, self.lender._pack_part(self.lender.tail, at))
            tokens = min(self.stream.block, tail.shape[1] - at)
            rows.append(self.stream.unpack(packed, tokens, tail.dtype))
        return torch.cat(rows, 1)

    def _pack_part(self, tail: Tensor, at: int) -> list[Packed]:
        """The block of ``tail`` from ``at`` on, packed but not sealed."""
        part = tail[:, at : at + self.stream.block].unsqueeze(1)
        return pack([self], [part], self.stream.tokens + at)[0]

    def _place_sinks(self, rows: Tensor, exact: Tensor | None) -> Tensor:
        """Put the exact rows of sealed sinks into ``rows`` ``[B, T, .]``."""
        if exact is None or self.sink_at is None:
            return rows
        sequence, slot = ((self.sink_at >= 0) & (self.sink_at < rows.shape[1])).nonzero(
            as_tuple=True
        )
        column = self.sink_at[sequence, slot].long()
        return rows.index_put((sequence, column), exact[sequence, slot])

    def _place_tail_sinks(self, rows: Tensor, exact: Tensor) -> Tensor:
        start = self.stream.tokens
        keep = self.index.sink[:, start : start + exact.shape[1], None].to(rows.device)
        return torch.cat([rows[:, :start], torch.where(keep, exact, rows[:, start:])], 1)

    def _parts(self, tokens: int, through_store: bool) -> list[States]:
        """Keys (before RoPE unless the codec is `rotated`) and values ``[B, t, G*D]`` of the first ``tokens``
        tokens, in order: those that come from codes, with ``through_store`` also of the tail, then those of
        the tail, exactly."""
        assert self.tail is not None
        sinks = self.tail[:, :0] if self.sinks is None else self.sinks
        count = sinks.shape[1]
        tail = self.tail
        if not through_store:
            tail = tail[:, : max(tokens - self.stream.tokens, 0)]
            tokens = min(tokens, self.stream.tokens)
        exact = self.codec.exact(torch.cat([sinks, tail], 1))
        exact_tail = exact[0][:, count:], exact[1][:, count:]
        if not tokens:
            return [exact_tail]
        recalled = self.recalled if self.recalled is not None else self.recall(tokens)
        assert recalled is not None
        coded = []
        for rows, true in zip(self.codec.rebuild(recalled[:, :tokens]), exact, strict=True):
            rows = self._place_sinks(rows, true[:, :count])
            if through_store:
                rows = self._place_tail_sinks(rows, true[:, count:])
            coded.append(rows)
        parts = [(coded[0], coded[1])]
        if not through_store and tail.shape[1]:
            parts.append(exact_tail)
        return parts

    def _rotated_parts(self, tokens: int) -> list[States]:
        """The same as attention reads them: rotated heads ``[B, t, G, D]``."""
        parts, start = [], 0
        for states in self._parts(tokens, self.through_store):
            parts.append(self._heads(states, start))
            start += states[0].shape[1]
        return parts

    def _heads(self, states: States, start: int) -> States:
        """States ``[B, t, G*D]`` of the tokens from ``start`` on to rotated heads ``[B, t, G, D]``."""
        view = self.codec.view
        key, value = (s.unflatten(-1, (view.kv_heads, view.head_size)) for s in states)
        if not self.codec.rotated:
            cos, sin = self.index.rope(key)
            stop = start + key.shape[1]
            key = rotate(key, cos[:, start:stop], sin[:, start:stop])
        return key, value

    def states(self) -> States:
        """Keys and values of all tokens as attention would read them, two ``[B, G, T, D]``."""
        return _join(self._rotated_parts(self.get_seq_length()))

    def held(self) -> States:
        """All that is known of all tokens: keys (before RoPE unless the codec is `rotated`) and values, two
        ``[B, T, G*D]``. Sealed tokens as they read; sinks and tail exactly, whatever attention reads."""
        keys, values = zip(*self._parts(self.get_seq_length(), through_store=False), strict=True)
        return torch.cat(keys, 1), torch.cat(values, 1)

    def read(
        self, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """What the newest tokens attend to, after their `append`.

        Args:
            key, value: the newest tokens' exact states ``[B, G, t, D]``.
            mask: as the attention function got it, ``[B, 1, t, T]`` or None.

        Returns:
            keys and values ``[B, G, T', D]`` and the mask for them. ``T' = T`` but for
            ``through_store`` with a tail, where recent tokens appear twice (exact and as stored) and
            the mask picks one of the two for every query.
        """
        past = self.get_seq_length() - key.shape[2]
        if self.through_store:
            parts = self._rotated_parts(past + key.shape[2])
            if self.fresh is not None:
                exact = self.codec.exact(self.fresh)
                start = past + key.shape[2] - self.fresh.shape[1]
                parts.append(self._heads(exact, start))
                mask = self._band(mask, key.shape[2], start)
            states = _join(parts)
        elif past:
            new = key.transpose(1, 2), value.transpose(1, 2)
            states = _join([*self._rotated_parts(past), new])
        else:
            states = key, value
        if self.below is not None:
            self.below.release()
        return *states, mask

    def _band(self, mask: Tensor | None, queries: int, start: int) -> Tensor:
        """The mask over all tokens as stored, then over the exact ones from ``start`` on: each query
        reads its last ``tail`` tokens exactly and older ones as stored."""
        assert self.tail is not None
        columns = torch.arange(self.get_seq_length(), device=self.tail.device)
        age = columns[-queries:, None] - columns[None]
        recent = (age < self.method.tail) & (columns >= start)
        if mask is None:
            mask = (age >= 0)[None, None]
        closed = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        older = mask.masked_fill(recent, closed)
        newer = mask.masked_fill(~recent, closed)[..., start:]
        return torch.cat([older, newer], -1)

    # -- the batch and the length --------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``abs(tokens_to_remove)`` tokens. Sealed codes that stay are not touched."""
        if self.tail is None:
            return
        keep = max(self.get_seq_length() - abs(tokens_to_remove), 0)
        if keep == 0:
            return self.reset()
        self.tail = self.tail[:, : max(keep - self.stream.tokens, 0)].clone()
        self.stream.crop(keep)
        if self.sink_at is not None:
            self.sink_at = self.sink_at.masked_fill(self.sink_at >= keep, -1)
        self.release()

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.tail is None:
            return
        self.stream.select(indices)
        self.tail = self.tail[indices.to(self.tail.device)]
        if self.sinks is not None and self.sink_at is not None:
            self.sinks = self.sinks[indices.to(self.sinks.device)]
            self.sink_at = self.sink_at[indices.to(self.sink_at.device)]
        self.release()

    reorder_cache = batch_select_indices

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.tail is not None:
            batch = torch.arange(self.tail.shape[0])
            self.batch_select_indices(batch.repeat_interleave(repeats))

    # -- parts of transformers' layer contract that do not apply ---------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise ValueError("a compressed layer is filled by forward passes only")

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> States:
        raise ValueError("use the cache's own update(): a layer alone does not see the layer input")

    def offload(self) -> None:
        raise ValueError("offloading is not supported by compressed layers")

    prefetch = offload


def _join(parts: list[States]) -> States:
    """Parts of a context, ``[B, t, G, D]`` each, as the attention function takes them, ``[B, G, T, D]``."""
    keys, values = (
        torch.cat(part, 1) if len(part) > 1 else part[0] for part in zip(*parts, strict=True)
    )
    return keys.transpose(1, 2), values.transpose(1, 2)
