"""StaticLayer: one layer of a `StaticKVCache`, its past in pages and rings that never move.

Letters: ``B`` sequences, ``t`` new tokens of each, ``H`` query heads, ``G`` key/value heads of size ``D``,
``W = 2 G D``.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..methods import LayerCodec, Method
from . import finite
from .angles import Angles
from .batch_layout import BatchLayout
from .built import States
from .layer import PastLayer, other_dtype
from .packer import Packer
from .paged import PagedPast
from .sequences import Sequences
from .step import Chunk

if TYPE_CHECKING:
    from ..kernels.backend import Backend
    from ..kernels.call import AttentionCall


def common_dtype(key: Tensor, value: Tensor) -> torch.dtype:
    """What holds both as they are: under autocast they may differ."""
    return key.dtype if key.dtype == value.dtype else torch.promote_types(key.dtype, value.dtype)


class StaticLayer(PagedPast, PastLayer):
    """One layer of a `StaticKVCache`, whose sequences have pages and a ring of their own.

    Args:
        room: tokens of a sequence.
        angles: of the rotary embedding; None where the codec keeps keys after it.
        backend: what reads pages in place and packs blocks.
    """

    def __init__(
        self,
        codec: LayerCodec,
        method: Method,
        room: int,
        angles: Angles | None,
        backend: "Backend",
        packer: Packer,
    ) -> None:
        self.room = room
        super().__init__(codec, method.group, angles, backend, packer, sink=method.sink)
        self.batch_layout: BatchLayout | None = None
        self._replaced: Tensor | None = None
        self._answered: tuple[object, ...] | None = None
        """What the newest call asked, if it can be repeated: most steps ask what the one before did."""
        self.forget_pass()

    @property
    def nbytes(self) -> int:
        """Of all memory that is reserved."""
        return sum(t.nbytes for t in self._memory)

    @property
    def addresses(self) -> list[int]:
        """Where its memory lies."""
        return [t.data_ptr() for t in self._memory]

    @property
    def _memory(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._pool, self._rings, self.sinks

    @torch.inference_mode(False)  # what is made within it could not be written to outside
    def reserve(self, layout: BatchLayout, dtype: torch.dtype) -> None:
        """Take the memory for a batch."""
        device, batch = self.codec.view.device, layout.batch
        size = batch * layout.columns, self.layout.nbytes
        pages = torch.empty(size, dtype=torch.uint8, device=device)
        # Rows that were never written are multiplied by weights of 0.
        shape = batch, layout.retention.capacity, self.row
        self._use(layout, pages, torch.zeros(shape, dtype=dtype, device=device))

    def _use(self, layout: BatchLayout, pages: Tensor, rings: Tensor) -> None:
        self.batch_layout, self._answered = layout, None
        self.bind(pages, rings, rings.shape[1], slots=layout.batch)

    @torch.inference_mode(False)
    def take(self, other: "StaticLayer", layout: BatchLayout) -> None:
        """Have a copy of what another layer holds, whose batch has this ``layout`` here."""
        if other.batch_layout is not None:
            self._use(layout, other._pool.clone(), other._rings.clone())
            self.sinks.copy_(other.sinks)

    # -- a forward pass ----------------------------------------------------------------------------

    def forget_pass(self) -> None:
        """Forget what holds for one forward pass only."""
        self._pending: Tensor | None = None
        self.seen = False
        """Whether this pass has come to the layer."""

    def attend_newest(self, call: "AttentionCall", sequences: Sequences, out: Tensor) -> None:
        """Attention of the newest tokens, which are kept, into ``out`` ``[B, t, H, D]``. Reads no mask: none
        of them is padding, and each comes before the next."""
        form = call.form(out)
        if form == self._answered:
            assert self._paged is not None
            self._paged.repeat(call, sequences, out)
            return
        self._answered = None  # should it fail, too
        self._check_dtype(call.key, call.value)
        self.attend_in_place(call.by_row(), sequences, out.flatten(0, 1))
        as_given = sequences.queries == 1 and call.key.dtype == call.value.dtype == self._rings.dtype
        repeats = as_given and self._paged is not None and self._paged.repeats
        if repeats:
            self._answered = form

    def append(self, key: Tensor, value: Tensor) -> Tensor:
        """Keep the newest tokens: pack whole blocks, and give the others to rings in `fill_rings`.

        Args:
            key: ``[B, G, t, D]``, rotated, as ``value``.

        Returns:
            the rows ``[T, W]`` of those that are no padding.

        Raises:
            ValueError: they are not finite.
        """
        layout = self.batch_layout
        assert layout is not None
        self._check_dtype(key, value)
        real = layout.new.to(key.device)
        states = [t.detach().transpose(1, 2)[real] for t in (key, value)]
        rows = torch.cat([t.flatten(1) for t in states], -1)
        finite.check_rows(rows, self.codec.view.index)
        self.seal(rows, layout.step)
        self._pending = rows[layout.step.readers(native=False)[1].kept]
        return rows

    def whole(self, key: Tensor, value: Tensor) -> States:
        """The same, and keys and values of all tokens, ``[B, G, ., D]``; zeros of padding, and of a sequence
        that has no new token."""
        rows, layout = self.append(key, value), self.batch_layout
        assert layout is not None
        if not layout.length:
            return key, value
        _, chunks = layout.step.readers(native=False)
        each = list(zip(layout.members, chunks.each, strict=True))
        return self._read(each, rows, torch.cat([layout.real, layout.new], 1))

    def _read(self, each: list[tuple[int, Chunk]], rows: Tensor, real: Tensor) -> States:
        """Keys and values ``[B, G, T, D]`` of these sequences, with the new ``rows``; zeros of all others,
        and where ``real`` ``[B, T]`` is False."""
        view, real = self.codec.view, real.to(rows.device)
        shape = len(real), view.kv_heads, real.shape[1], view.head_size
        found = rows.new_zeros(shape), rows.new_zeros(shape)
        for sequence, chunk in each:
            own = self.read(chunk, rows[chunk.new.start : chunk.new.stop])
            for to, read in zip(found, own, strict=True):
                to[sequence, :, real[sequence]] = read.transpose(0, 1).to(rows.dtype)
        return found

    @torch.no_grad()
    def states(self) -> States:
        """Keys and values of all tokens as attention reads them, two ``[B, G, T, D]``; zeros of padding."""
        assert self.batch_layout is not None
        return self._read(self.batch_layout.held(), self._rings[0, :0], self.batch_layout.real)

    def settle(self) -> None:
        """The pass has succeeded: seal whole blocks of what was read in place.

        Raises:
            ValueError: NaN or infinity in one of them.
        """
        if self._pending is None:
            assert self.batch_layout is not None
            self.seal_held(self.batch_layout.step)

    def fill_rings(self) -> None:
        """Put what was read as a whole into rings. Comes after all layers have settled."""
        self._replaced = None
        if self._pending is not None:
            assert self.batch_layout is not None
            self._replaced = self._rings.clone() if self.batch_layout.length else None
            self.write_rings(self._pending, self.batch_layout.step.readers(native=False)[1])
        self.forget_pass()

    def put_back(self) -> bool:
        """Bring back rings as they were before the newest pass; False where it wrote to them in place."""
        replaced, self._replaced = self._replaced, None
        if replaced is not None:
            self._rings.copy_(replaced)
        return replaced is not None

    def _check_dtype(self, key: Tensor, value: Tensor) -> None:
        dtype = common_dtype(key, value)
        if dtype != self._rings.dtype:
            raise other_dtype(self.codec.view.index, dtype, self.held_dtype, "reset() the cache")

    # -- transformers' contract of a layer ---------------------------------------------------------

    def get_seq_length(self) -> int:
        return 0 if self.batch_layout is None else self.batch_layout.length

    def get_max_length(self) -> int:
        return self.room

    @property
    def is_initialized(self) -> bool:
        return self.batch_layout is not None

    @property
    def max_cache_len(self) -> int:
        return self.room

    @property
    def batch_size(self) -> int:
        if self.batch_layout is None:
            raise AttributeError("a layer has no batch before its first tokens come")
        return self.batch_layout.batch

    max_batch_size = batch_size  # its name before transformers 5.13

    @property
    def held_dtype(self) -> torch.dtype:
        return self._rings.dtype

    # -- parts of it that are the cache's alone ----------------------------------------------------

    def _refuse(self, *args: object, **kwargs: object) -> None:
        raise ValueError("the layers of a StaticKVCache change together: call the cache's own method")

    reset = crop = reorder_cache = batch_select_indices = batch_repeat_interleave = _refuse
    update = lazy_initialization = offload = prefetch = _refuse
