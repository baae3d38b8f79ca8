"""KVCache: the compressed cache that a model's ``generate`` and ``forward`` take."""

import copy
from collections import Counter
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Cache

from . import compat, finite
from .attention import ObservingCache, attach
from .blocks import seal
from .calibrate.artifact import Calibration
from .convert import fill
from .kernels.angles import AngleBook
from .kernels.dispatch import choose
from .kernels.folded import FoldedAttention
from .kernels.gpu import triton_attention, triton_carrier
from .kernels.gpu.angles import TurnBook
from .kernels.gpu.support import NAME as TRITON
from .kernels.newest import Newest
from .kernels.packed import MOST_QUERIES, PackedAttention
from .kernels.parts import PartedAttention
from .kernels.rebuilt import RebuiltAttention
from .kernels.sealing import instruction_set
from .layer import CompressedLayer, States
from .methods import LayerCodec, Method, Seen
from .methods.xquant import Rematerialized
from .models import AttentionView
from .models.base import rotate
from .report import Report
from .spec import parse_method
from .tokens import TokenIndex

if TYPE_CHECKING:
    from .kernels.gpu.attention import TritonAttention
    from .kernels.gpu.rebuilt import TritonRebuilt

    Kernel = PackedAttention | PartedAttention | TritonAttention | TritonRebuilt

ATTEND = ("chunk", "store")
CHECKED_TOKENS = 8


class KVCache(Cache, ObservingCache):
    """A KV cache of ``model`` compressed by ``method``.

    ```python
    cache = KVCache(model, "xquant-4bit")
    model.generate(**inputs, past_key_values=cache)
    print(cache.report())
    ```

    Full-attention layers are compressed; others keep the cache that transformers gives them.

    Args:
        model: a causal language model of transformers; the cache attaches itself to it.
        method: a method or its spec string.
        attend: ``"chunk"``: tokens of one forward pass attend to each other exactly and to earlier
            ones through the store. ``"store"``: every token reads the store from the first on, itself
            included, which is what perplexity is measured with.
        calibration: what `xquant.calibrate` found, or its file; for the methods that need one.
        kernel: ``"auto"`` takes the fastest that can read this method on this machine, and `report` says
            which; ``"triton"``, ``"avx512"``, ``"avx2"``, ``"folded"`` and ``"reference"`` ask for one. It
            also says what blocks are sealed and rebuilt with, to the same bits: ``"folded"`` and
            ``"reference"`` leave that to torch too.

    Raises:
        ValueError: unknown method or option, a kernel that cannot be used, a calibration that is missing
            or made for something else, or a model that cannot be served; the message says why.
        OSError: the calibration's file cannot be read.
        TypeError: ``model`` is not a transformers model.
    """

    def __init__(
        self,
        model: nn.Module,
        method: str | Method,
        attend: str = "chunk",
        calibration: Calibration | str | PathLike[str] | None = None,
        kernel: str = "auto",
    ) -> None:
        self.method = parse_method(method)
        if attend not in ATTEND:
            raise ValueError(f"attend is {' or '.join(ATTEND)}, not '{attend}'")
        if attend == "store" and not self.method.causal:
            raise ValueError(
                f"{self.method.spec} stores codes of a layer above, which do not exist yet when a token"
                " attends to itself: it can generate, but not attend to the store alone"
            )
        if isinstance(calibration, str | PathLike):
            calibration = Calibration.load(calibration)
        self.attachment = attach(model)
        view = self.attachment.view
        self.index = TokenIndex(self.method.sink, view.rope)
        layers: list[Any] = compat.default_layers(compat.text_config(model))
        below = None
        codecs = self.attachment.codecs(self.method, calibration)
        path = instruction_set(kernel)
        for layer, codec in zip(view.compressed, codecs, strict=True):
            below = layers[layer.index] = CompressedLayer(
                codec, self.method, self.index, attend == "store", below, path
            )
        super().__init__(layers=layers)
        CompressedLayer.link(self.compressed)
        self.kernels = {
            layer.codec.view.index: choose(
                layer.codec, layer.stream.block, layer.through_store, kernel
            )
            for layer in self.compressed
        }
        self._attach_kernels()
        self._begun: tuple[int, dict[int, Any]] | None = None

    def _attach_kernels(self) -> None:
        self._book, self._turns = AngleBook(self.index), TurnBook(self.index)
        self._attentions: dict[int, Kernel] = {}
        for layer in self.compressed:
            index = layer.codec.view.index
            name = self.kernels[index].name
            if name == TRITON:
                self._attentions[index] = triton_attention(layer, self._turns)
                layer.carrier = triton_carrier(layer)
            elif name != "reference" and isinstance(layer.codec, Rematerialized):
                self._attentions[index] = RebuiltAttention(layer, name)
            elif name == "folded":
                self._attentions[index] = FoldedAttention(layer)
            elif name != "reference":
                self._attentions[index] = PackedAttention(layer, name, self._book)

    @property
    def compressed(self) -> list[CompressedLayer]:
        """The layers that the method compresses, bottom up."""
        return [layer for layer in self.layers if isinstance(layer, CompressedLayer)]

    # -- a forward pass ------------------------------------------------------------------------

    def begin(self, batch: int) -> None:
        if self.index.batch not in (0, batch):
            raise ValueError(
                f"this cache holds a batch of {self.index.batch}, the input has {batch}: use"
                " batch_repeat_interleave or batch_select_indices, or a new cache"
            )
        # Layers that are not ours cannot be cropped past their window, so they are put back whole.
        others = {
            i: copy.copy(layer)
            for i, layer in enumerate(self.layers)
            if not isinstance(layer, CompressedLayer)
        }
        self._begun = (self.index.length, others)

    def observe(
        self, view: AttentionView, x: Tensor, positions: Tensor | None, mask: Tensor | None
    ) -> None:
        batch, length = x.shape[:2]
        if view.index != self.attachment.view.compressed[0].index:
            return
        if positions is None:
            start = self.index.length
            positions = torch.arange(start, start + length, device=x.device)[None]
        if positions.dim() != 2:
            raise ValueError("positions of several axes (multimodal RoPE) are not supported")
        self.index.append(positions.expand(batch, length), _real(mask, batch, length, x.device))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> States:
        """Store a layer's new states, as the model's attention calls it.

        Returns what the attention function expects: the new states where ours will ask the cache for
        the rest, otherwise the keys and values of the whole context, ``[B, G, T, D]``.

        Raises:
            ValueError: called by another model than the cache was made for, or outside a forward
                pass; NaN in the hidden states.
        """
        layer = self.layers[layer_idx]
        if not isinstance(layer, CompressedLayer):
            own: States = layer.update(key_states, value_states, *args, **kwargs)
            return own
        seat = self.attachment.seats[layer_idx]
        seen = seat.seen(key_states, value_states)
        if layer.get_seq_length() == 0:
            self._check(layer.codec, seen)
        layer.append(seen, hold=seen.x.shape[1] <= MOST_QUERIES)
        if seat.fused:
            return key_states, value_states
        key, value, _ = layer.read(key_states, value_states, None)
        return key, value

    def attend(self, index: int, newest: Newest) -> Tensor | None:
        kernel = self._attentions.get(index)
        queries = newest.query.shape[2]
        if kernel is None or queries > MOST_QUERIES or newest.query.requires_grad:
            return None
        if self.layers[index].get_seq_length() == queries:
            return None  # nothing came before
        return kernel.attend(newest)

    def answer(
        self, index: int, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        layer: CompressedLayer = self.layers[index]
        return layer.read(key, value, mask)

    def finish(self) -> None:
        """End a forward pass: one that failed, or fails here, leaves the cache as it was before.

        Raises:
            ValueError: NaN or infinity in the hidden states, where they were not asked about before.
        """
        self._book.clear()
        self._turns.clear()
        self.index.forget()
        for layer in self.compressed:
            layer.release()
        begun, self._begun = self._begun, None
        if begun is None:
            return
        complete = False
        try:
            complete = self._complete(begun[0])
        finally:
            if not complete:
                self._return_to(*begun)

    def _complete(self, before: int) -> bool:
        """Seal what the layers hold for the end of the forward pass that began with ``before`` tokens. False
        where it failed: some have not got its tokens."""
        length = self.index.length
        if any(layer.get_seq_length() != length for layer in self.compressed):
            return False
        due = [layer for layer in self.compressed if layer.due]
        if due or length - before > MOST_QUERIES:
            finite.check_tails(self.compressed, before)
        seal(due)
        self.index.forget()
        return True

    def _return_to(self, length: int, others: dict[int, Any]) -> None:
        for layer in self.compressed:
            layer.crop(min(length - layer.get_seq_length(), 0))
        for i, layer in others.items():
            self.layers[i] = layer
        self.index.crop(length) if length else self.index.reset()

    def _check(self, codec: LayerCodec, seen: Seen) -> None:
        """Refuse a model whose keys and values are not what its adapter rebuilds."""
        count = min(CHECKED_TOKENS, seen.x.shape[1])
        start = self.index.length - count
        newest = seen.last(count)
        states = codec.exact(codec.features(newest))
        view = codec.view
        key, value = (s.unflatten(-1, (view.kv_heads, view.head_size)) for s in states)
        if not codec.rotated:
            cos, sin = self.index.rope(key)
            key = rotate(key, cos[:, start:], sin[:, start:])
        for name, ours, theirs in (("keys", key, newest.key), ("values", value, newest.value)):
            theirs = theirs.transpose(1, 2).float()
            error = (ours.float() - theirs).norm() / theirs.norm().clamp_min(1e-6)
            # NaN compares false: it is reported as what it is by `finite`.
            if error > (1e-3 if view.dtype == torch.float32 else 5e-2):
                raise ValueError(
                    f"{type(self.attachment.view.model).__name__} is not supported: the {name} of"
                    f" layer {view.index} are not what its projections and standard RoPE give"
                    f" (relative error {error:.2g})"
                )

    # -- the batch and the length --------------------------------------------------------------

    def reset(self) -> None:
        """Empty the cache for another batch; the model stays attached."""
        # Layers that are not ours are made anew: before 5.18, theirs keep their length when reset.
        own = compat.default_layers(compat.text_config(self.attachment.view.model))
        for i, layer in enumerate(self.layers):
            if isinstance(layer, CompressedLayer):
                layer.reset()
            else:
                self.layers[i] = own[i]
        self.index.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the newest tokens: ``-n`` removes ``n``, a positive number is the length to keep."""
        length = self.index.length
        keep = length + tokens_to_remove if tokens_to_remove < 0 else tokens_to_remove
        if tokens_to_remove == 0 and not compat.CROP_ZERO_EMPTIES:
            keep = length
        keep = min(max(keep, 0), length)
        for layer in self.layers:
            layer.crop(keep - length if isinstance(layer, CompressedLayer) else tokens_to_remove)
        self.index.crop(keep) if keep else self.index.reset()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences ``indices`` (integers, or a bool mask over the batch)."""
        indices = torch.as_tensor(indices)
        if indices.dtype == torch.bool:
            indices = indices.nonzero().squeeze(1)
        if self.index.batch:
            super().batch_select_indices(indices)
            self.index.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence ``repeats`` times; sealed blocks are shared, not copied."""
        if self.index.batch:
            self.index.select(torch.arange(self.index.batch).repeat_interleave(repeats))
        super().batch_repeat_interleave(repeats)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the batch for beam search."""
        super().reorder_cache(beam_idx)
        if self.index.batch:
            self.index.select(beam_idx)

    def __deepcopy__(self, memo: dict[int, Any]) -> "KVCache":
        """A cache of its own for the same model, which is how a prompt's cache is used again."""
        shared = (self.attachment, *(layer.codec for layer in self.compressed))
        memo.update((id(thing), thing) for thing in shared)
        other = memo[id(self)] = object.__new__(type(self))
        own = {
            k: v for k, v in self.__dict__.items() if k not in ("_book", "_turns", "_attentions")
        }
        other.__dict__.update(copy.deepcopy(own, memo))
        other._attach_kernels()
        return other

    def converted(
        self,
        method: str | Method,
        calibration: Calibration | str | PathLike[str] | None = None,
        kernel: str = "auto",
    ) -> "KVCache":
        """A cache of its own for the same model that holds the same past, stored by another method.

        ```python
        small = KVCache(model, "tc-cl-1bit")  # a long prompt, kept in few bytes
        model(prompt, past_key_values=small)
        fast = small.converted("kivi-4bit")  # to generate from
        ```

        Sealed tokens go over as they read, sinks and the tail exactly, and are stored as if they had come in
        one forward pass, with ``attend`` as here. By the method that the cache has already it is a copy:
        codes and kernels stay as they are.

        Args:
            method, calibration, kernel: as of `KVCache`.

        Raises:
            ValueError, OSError: as of `KVCache`, and for a method that stores layer inputs (``xquant``,
                ``xquant-cl``), which keys and values do not tell.
        """
        method = parse_method(method)
        if method == self.method:
            return copy.deepcopy(self)
        attend = "store" if self.compressed[0].through_store else "chunk"
        other = KVCache(self.attachment.view.model, method, attend, calibration, kernel)
        fill(other, self)
        return other

    # -- bytes ---------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes resident in the whole cache, layers that are not compressed included."""
        return self.report().cache_bytes

    def report(self) -> Report:
        """What is resident, layer by layer kind; cheap enough to call at any time."""
        view = self.attachment.view
        sealed: Counter[str] = Counter()
        values = sealed_values = 0
        for layer in self.compressed:
            per_token = 2 * layer.codec.view.kv_width
            values += per_token * self.index.batch * layer.get_seq_length()
            sealed_values += per_token * self.index.batch * layer.stream.tokens
            for packed in layer.stream.pool:
                sealed.update({name: tensor.nbytes for name, tensor in packed.items()})
        sinks = sum(layer.sink_nbytes for layer in self.compressed)
        tail = sum(layer.tail_nbytes for layer in self.compressed)
        tables = sum(layer.stream.table_nbytes for layer in self.compressed)
        index = self.index.nbytes + tables
        codebooks = sum(layer.stream.shared_nbytes for layer in self.compressed)
        others = [la for la in self.layers if not isinstance(la, CompressedLayer)]
        skipped = sum(_held(layer) for layer in others)
        resident = sealed.total() + codebooks + sinks + tail + index
        model = view.model

        def bits(size: int) -> float:
            return 8 * size / sealed_values if sealed_values else 0.0

        return Report(
            method=self.method.spec,
            batch=self.index.batch,
            tokens=self.index.length,
            kernel=", ".join(dict.fromkeys(map(str, self.kernels.values()))),
            layers_compressed=[layer.codec.view.index for layer in self.compressed],
            layers_skipped=dict(view.skipped),
            sealed_bytes=dict(sealed),
            table_bytes=codebooks,
            sink_bytes=sinks,
            tail_bytes=tail,
            index_bytes=index,
            skipped_bytes=skipped,
            cache_bytes=resident + skipped,
            full_cache_bytes=2 * values + sum(_values(layer) for layer in others) * 2,
            bits_per_value=bits(sealed.total() + codebooks + sinks),
            code_bits=bits(sealed["codes"] + sealed["values"]),
            cache_ratio=resident / (2 * values) if values else 0.0,
            model_bytes=sum(p.nbytes for p in model.parameters()),
            codec_bytes=sum(la.codec.nbytes for la in self.compressed),
        )


def _real(mask: Tensor | None, batch: int, length: int, device: torch.device) -> Tensor:
    """Which of the new tokens are not padding, from the last query's row of a 4D mask."""
    if mask is None or not isinstance(mask, Tensor) or mask.dim() != 4:
        return torch.ones(batch, length, dtype=torch.bool, device=device)
    seen = mask[:, 0, -1, -length:]
    if seen.dtype != torch.bool:
        seen = seen > torch.finfo(seen.dtype).min / 2
    return seen.expand(batch, length)


def _values(layer: Any) -> int:
    held = (getattr(layer, "keys", None), getattr(layer, "values", None))
    return sum(t.numel() for t in held if isinstance(t, Tensor))


def _held(layer: Any) -> int:
    held = (getattr(layer, "keys", None), getattr(layer, "values", None))
    return sum(t.nbytes for t in held if isinstance(t, Tensor))
