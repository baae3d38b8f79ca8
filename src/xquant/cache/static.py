"""StaticKVCache: a `KVCache` whose memory is taken once, for decoding in steps of one shape."""

from collections.abc import Callable
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from ..calibration import Calibration
from ..contents.options import CacheOptions
from ..kernels.call import AttentionCall
from ..kernels.choose import Choice
from ..methods import AttentionInputs, Method
from ..models import AttentionView
from ..past import finite
from ..past.batch_layout import EMPTY, BatchLayout, State
from ..past.built import States
from ..past.sequences import MOST_QUERIES
from ..past.static_layer import StaticLayer, common_dtype
from ..past.step import Retention
from ..seam.check import check_not_recorded
from ..seam.mark import new_mark
from ..seam.masks import SHOWN, PassMask
from ..seam.passes import LayerInputs, Route
from .base import CompressedCache
from .static_layers import check_method, layers_of


class StaticKVCache(CompressedCache):
    """A KV cache of ``model``, compressed by ``method``, with room for ``room`` tokens of each sequence.

    The memory is taken when the first tokens come, and nothing in it moves: pages of packed blocks, and a
    ring of recent tokens for each sequence. A decode step asks the host for nothing but the number of tokens,
    so it costs less in Python than one of `KVCache`, and a compiled one can be recorded in a CUDA graph
    (``torch.compile(model, mode="reduce-overhead")``). What tokens read is what they read in a `KVCache`, up
    to rounding: blocks are packed of keys that RoPE is removed from.

    The sequences of a batch stay, so there is no beam search, and `crop` goes back 16 tokens at most.

    Args:
        model: a causal language model of transformers, all of whose layers attend to all tokens. The cache
            sets hooks on it.
        method: a method, or its spec string. Layers are packed one by one, from keys and values.
        room: tokens of a sequence, padding included.
        calibration: as of `KVCache`, as ``kernel``.

    Raises:
        ValueError: unknown method or option, a kernel that cannot be used, a calibration that is missing
            or made for something else, or a model or a method that cannot be served in this way.
        OSError: the calibration's file cannot be read.
        TypeError: ``model`` is not a transformers model.

    Examples:
        >>> from xquant import StaticKVCache
        >>> cache = StaticKVCache(model, "kivi-4bit", room=512)
        >>> out = model.generate(**inputs, cache=cache, max_new_tokens=8)
        >>> out.shape[1] - cache.get_seq_length()  # the newest token has not been read yet
        1
    """

    def __init__(
        self,
        model: nn.Module,
        method: str | Method,
        room: int,
        calibration: Calibration | str | PathLike[str] | None = None,
        kernel: str = "auto",
    ) -> None:
        self._check_model(model)
        options = CacheOptions.of(method, calibration=calibration, kernel=kernel)
        if room < 1:
            raise ValueError(f"room for {room} tokens: it is 1 at least")
        check_method(options.method)
        self.room = room
        self._layout: BatchLayout | None = None
        self._positions: dict[int, Tensor] = {}
        self._in_place = False
        super().__init__(model, options)
        self._no_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self._device)

    def _build(self) -> None:
        own = self.method, self.codecs, self.room, self.options.kernel
        self.layers, choices = layers_of(self.attachment.view, *own)
        self._choices = {codec.view.index: each for codec, each in zip(self.codecs, choices, strict=True)}
        self._layout = None

    @property
    def choices(self) -> dict[int, Choice]:
        return self._choices

    @property
    def _device(self) -> torch.device:
        return self.layers[0].codec.view.device

    @property
    def nbytes(self) -> int:
        """Of all memory that is reserved; 0 before the first tokens come."""
        return sum(layer.nbytes for layer in self.layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens held, padding included. Those of a forward pass count once it has succeeded."""
        return 0 if self._layout is None else self._layout.length

    @property
    def is_initialized(self) -> bool:
        """Whether the memory is taken."""
        return all(layer.is_initialized for layer in self.layers)

    def early_initialization(
        self, batch_size: int, num_heads: Any, head_dim: Any, dtype: torch.dtype, device: Any
    ) -> None:
        """Take the memory for a batch now, for states of ``dtype``. Heads and the device are the model's."""
        if not self.get_seq_length():
            self._refresh()
            self._reserve(batch_size)
            for layer in self.layers:
                self._entered(layer, dtype)
        self._forget_pass()

    # -- a forward pass ----------------------------------------------------------------------------

    @property
    def _held(self) -> tuple[int, int]:
        length = self.get_seq_length()
        return (self._layout.batch, length) if self._layout is not None and length else (0, 0)

    def begin(self, batch: int, length: int, mask: PassMask) -> State:
        check_not_recorded(self._no_mask)
        return super().begin(batch, length, mask)

    def _start(self, batch: int, length: int, mask: PassMask) -> None:
        held = self.get_seq_length()
        if held + length > self.room:
            raise ValueError(
                f"{length} new tokens do not fit: this cache has room for {self.room}, and holds {held}"
            )
        if not held:
            self._reserve(batch)
        layout = self._layout
        assert layout is not None
        new = torch.ones(batch, length, dtype=torch.bool, device="cpu")
        plain = mask.is_plain
        if mask.asks(length, self._device):
            if mask.shows_padding(layout.real):
                raise ValueError(SHOWN)
            real = mask.real(held, batch, length)
            new = new if real is None else real.cpu()
            plain = plain and bool(new.all()) and not mask.hides(layout.real)
        layout.begin(new)
        self._in_place = (
            held > 0
            and length <= MOST_QUERIES
            and plain
            and all(layer.in_place for layer in self.layers)
            and all(hooks.passes_on for hooks in self.attachment.hooks.values())
        )
        if self._in_place:
            self._sequences = layout.sequences()

    def _reserve(self, batch: int) -> None:
        """Be ready for the first tokens of a batch."""
        if self._layout is not None and self._layout.batch == batch:
            self._layout.clear()
            return
        self._layout = BatchLayout(batch, self.room, Retention.of(self.method, MOST_QUERIES), self._device)
        self._mark = new_mark(self._device)
        for layer in self.layers:
            layer.batch_layout = None

    @torch.inference_mode(False)  # what is made within it could not be written to outside
    def fixed_inputs(self, positions: bool) -> dict[str, Tensor]:
        """Inputs of the decoder in place of those that differ in size from step to step, or that only the
        number of tokens tells."""
        if not self._in_place:
            return {}
        fixed = {"attention_mask": self._no_mask}
        if not positions:
            return fixed
        assert self._layout is not None
        held, count = self._layout.length, self._layout.new.shape[1]
        if count not in self._positions:
            self._positions[count] = torch.zeros(1, count, dtype=torch.int64, device=self._device)
        self._positions[count].copy_(torch.arange(held, held + count, device="cpu")[None], non_blocking=True)
        return fixed | {"position_ids": self._positions[count]}

    def observe(self, given: LayerInputs) -> None:
        """What is kept is given to `update`."""

    @property
    def _traced_mark(self) -> Tensor | None:
        return self._mark if self._in_place else None

    def _take(self, layer: StaticLayer, inputs: AttentionInputs) -> Route:
        self._entered(layer, common_dtype(inputs.key, inputs.value))
        return Route.NEWEST if self._in_place else Route.WHOLE

    def _entered(self, layer: StaticLayer, dtype: torch.dtype) -> None:
        """The forward pass has come to a layer, which takes its memory for states of this dtype."""
        layer.seen = True
        if layer.batch_layout is None:
            assert self._layout is not None
            layer.reserve(self._layout, dtype)

    def fill(self, states: Callable[[AttentionView], States], batch: int, count: int) -> None:
        """Hold ``count`` more tokens of each sequence that no model computed, for benchmarks.

        Args:
            states: gives keys and values ``[B, G, count, D]`` of a layer.
        """
        self.begin(batch, count, PassMask())
        for layer in self.layers:
            key, value = states(layer.codec.view)
            self._entered(layer, common_dtype(key, value))
            layer.append(key, value)
        self._in_place = False
        self.finish()

    def attend_alone(self, call: AttentionCall) -> None:
        """Compute the attention of one token in every layer, and keep nothing, for benchmarks."""
        self.begin(len(call.query), 1, PassMask())
        assert self._layout is not None
        self._sequences, out = self._layout.sequences(), call.new_out()
        for layer in self.layers:
            layer.attend_newest(call, self._sequences, out)
        self._forget_pass()

    def attend(self, index: int, call: AttentionCall) -> Tensor | None:
        out = call.new_out()
        self.attend_in_place(index, call, out)
        return out

    def attend_in_place(self, index: int, call: AttentionCall, out: Tensor) -> None:
        layer: StaticLayer = self.layers[index]
        if layer is self.layers[-1] and finite.asked_at_once(call.key.device):
            # What is not finite in a layer is not finite in those above it.
            for states in (call.key, call.value):
                finite.check_rows(states, index)
        layer.attend_newest(call, self._sequences, out)

    def answer(
        self, index: int, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        layer: StaticLayer = self.layers[index]
        return *layer.whole(key, value), mask

    def _complete(self) -> bool:
        seen = [layer.seen for layer in self.layers]
        # Where the pass is compiled, none was seen.
        if any(seen) and not all(seen):
            return False
        assert self._layout is not None
        for layer in self.layers:
            layer.settle()
        try:
            for layer in self.layers:
                layer.fill_rings()
        except BaseException:  # an interruption
            for layer in self.layers:
                layer.put_back()
            raise
        self._layout.advance()
        self._forget_pass()
        return True

    def _forget_pass(self) -> None:
        self._begun, self._in_place = None, False
        for layer in self.layers:
            layer.forget_pass()

    def _state(self) -> State:
        return EMPTY if self._layout is None else self._layout.snapshot()

    def restore(self, state: State) -> None:
        self._forget_pass()
        length = state[0].shape[1]
        if self._layout is None or not length:
            self.reset()
            return
        back = [length < self._layout.length and layer.put_back() for layer in self.layers]
        self._layout.restore(state, rings=all(back))

    # -- changes -----------------------------------------------------------------------------------

    def reset(self) -> None:
        """Empty the cache for another batch. The memory stays until a batch of another size comes."""
        if self._layout is not None:
            self._layout.clear()
        self._forget_pass()

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the newest tokens: ``-n`` removes ``n``, a positive number is the length to keep.

        Raises:
            ValueError: some of those that stay are no longer at hand. That cannot be within 16 tokens of the
                most that the cache was ever given, dropped drafts included.
        """
        self._undo()
        length, keep = self.get_seq_length(), self._length_after(tokens_to_remove)
        if not keep:
            self.reset()
        elif keep < length:
            assert self._layout is not None
            state = self._layout.without(length - keep)
            if state is None:
                raise ValueError(
                    f"a static cache goes back {MOST_QUERIES} tokens at most, here from the"
                    f" {self._layout.most} that it was given, not to {keep}: use KVCache"
                )
            self._layout.restore(state, rings=False)

    def batch_select_indices(self, indices: Tensor) -> None:
        raise ValueError("the sequences of a static cache stay as they are: use KVCache")

    reorder_cache = batch_select_indices

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(repeats, device="cpu"))

    def __reduce__(self) -> Any:
        raise TypeError("a StaticKVCache is not saved: use KVCache")

    def __deepcopy__(self, memo: dict[int, Any]) -> "StaticKVCache":
        """A cache of its own for the same model, which is how a prompt's cache is used again."""
        own, model = self.options, self.attachment.view.model
        other = type(self)(model, own.method, self.room, own.calibration, own.kernel)
        memo[id(self)] = other
        self._undo()
        if self._layout is not None:
            other._layout, other._mark = self._layout.copied(), new_mark(self._device)
            for to, layer in zip(other.layers, self.layers, strict=True):
                to.take(layer, other._layout)
        return other
