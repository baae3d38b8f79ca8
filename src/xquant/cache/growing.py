"""KVCache: the compressed cache that a model's ``generate`` and ``forward`` take."""

import copy
import warnings
from os import PathLike
from typing import Any

from torch import Tensor, nn

from .. import compat
from ..calibration import Calibration
from ..contents.contents import Contents
from ..contents.options import CacheOptions
from ..contents.report import Report, report_of
from ..contents.snapshot import Snapshot
from ..contents.stack import LayerStack
from ..kernels.call import AttentionCall
from ..kernels.choose import Choice
from ..methods import AttentionInputs, LayerCodec, Method
from ..models.latent import Coded, Exact
from ..past.growing_layer import CompressedLayer
from ..past.offload import is_host
from ..past.sequences import MOST_QUERIES
from ..saved.resting import RestingCache
from ..seam.check import check_not_recorded, check_rope, check_states, places
from ..seam.hooks import Attachment
from ..seam.masks import SHOWN, PassMask
from ..seam.passes import LayerInputs, Route
from ..seam.route import route
from .changes import ChangingCache


class KVCache(ChangingCache, RestingCache):
    """A KV cache of ``model``, compressed by ``method``.

    Full-attention layers are compressed; others keep the cache that transformers gives them.

    Args:
        model: a causal language model of transformers. The cache sets hooks on it.
        method: a method, or its spec string.
        attend: with ``"chunk"`` tokens of one forward pass attend to each other exactly, and to earlier ones
            through the store; with ``"store"`` (for perplexity) every token reads the store, itself included.
        calibration: what `xquant.calibrate` found, or its file, for methods that need one.
        kernel: ``"auto"`` takes the fastest that can read this method on this machine, and `report` says
            which and why; on a GPU it is Triton's, where a trial agrees with the reference. ``"triton"``,
            ``"avx512"``, ``"avx2"``, ``"neon"``, ``"folded"`` and ``"reference"`` ask for one; with the last
            two torch packs blocks too, to the same bits.
        offload: ``"cpu"`` keeps sealed blocks in host memory, and brings those of a layer to the device while
            the layer before computes. Tokens in full stay on the device.
        budget: bytes, or a text such as ``"2GB"``. Tokens stay in full as long as the cache takes no more,
            the newest longest: what does not fit is compressed.

    Raises:
        ValueError: unknown method or option, a kernel that cannot be used, a calibration that is missing
            or made for something else, or a model that cannot be served; the message says why.
        OSError: the calibration's file cannot be read.
        TypeError: ``model`` is not a transformers model.

    Examples:
        >>> cache = KVCache(model, "kivi-4bit")
        >>> out = model.generate(**inputs, cache=cache, max_new_tokens=8)
        >>> out.shape[1] - cache.get_seq_length()  # the newest token has not been read yet
        1
    """

    attachment: Attachment

    def __init__(
        self,
        model: nn.Module,
        method: str | Method,
        attend: str = "chunk",
        calibration: Calibration | str | PathLike[str] | None = None,
        kernel: str = "auto",
        offload: str | None = None,
        budget: int | str | None = None,
    ) -> None:
        self._check_model(model)
        self._mask, self._shows_padding = PassMask(), False
        self.note: str = ""
        """Why the model no longer uses this cache, where it has been seen that it does not."""
        self.saved_tokens: Tensor | None = None
        """Of a cache that was loaded: the ids ``[B, T]`` that it was saved with, int64 on the CPU, as far
        as it still holds these tokens."""
        super().__init__(model, CacheOptions.of(method, attend, calibration, kernel, offload, budget))
        self._forget_states(compat.default_layers(self._config))

    def _build(self) -> None:
        view, codecs = self.attachment.view, self.codecs
        if view.rope.drifts and not all(codec.rotated for codec in codecs):
            raise ValueError(
                f"{self._family} turns keys by other angles for every length (dynamic NTK), and what"
                f" {self.method.spec} keeps before RoPE would lose them: use a method that keeps keys after,"
                " such as kivi-4bit:rope=post"
            )
        for codec in codecs:
            of_states = codec.keeps_states
            codec.view.require(not codec.rotated or not of_states, not of_states)
        if self.options.offload:
            self._check_offload(codecs)
        self.stack = LayerStack(codecs, self.options, view.rope)
        for layer in self.stack.layers:
            self.layers[layer.codec.view.index] = layer

    def _check_offload(self, codecs: list[LayerCodec]) -> None:
        if any(codec.coded_together for codec in codecs):
            raise ValueError(f"blocks of {self.method.spec} cannot be offloaded: it codes layers together")
        if any(is_host(codec.view.device) for codec in codecs):
            raise ValueError("offload=cpu needs a model on a device: this one is in host memory")

    @property
    def choices(self) -> dict[int, Choice]:
        return self.stack.choices

    @property
    def contents(self) -> Contents:
        """What the cache holds, for what saves, converts and reports it."""
        return Contents(self.attachment, self.method, self.stack, self.layers, self.linear_states)

    @property
    def compressed(self) -> list[CompressedLayer]:
        """The layers that the method compresses, bottom up."""
        return self.stack.layers

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens held. Those of a forward pass count once it has succeeded."""
        if self._begun is not None:
            return self._begun.length(layer_idx)
        return int(super().get_seq_length(layer_idx))

    # -- a forward pass ------------------------------------------------------------------------

    @property
    def _held(self) -> tuple[int, int]:
        return self.index.batch, self.index.length

    def _state(self) -> Snapshot:
        return Snapshot.of(self.contents)

    def restore(self, state: Snapshot) -> None:
        state.bring_back(self.contents)
        self._forget_pass()

    def _forget_pass(self) -> None:
        self.stack.forget_pass()
        self._begun, self._mask = None, PassMask()

    def _start(self, batch: int, length: int, mask: PassMask) -> None:
        self.stack.forget_unsealed()
        self._make_room(batch, length, self.contents)
        self._mask = mask
        held = self.index.length > 0 and mask.asks(length, self.index.real.device)
        self._shows_padding = held and mask.shows_padding(self.index.real)
        if self._shows_padding:
            warnings.warn(SHOWN, stacklevel=2)
        self.note = ""

    def _make_room(self, batch: int, new: int, others: Contents) -> None:
        if self.options.budget is not None:
            layers = [*others.others.values(), *others.linear_states.values()]
            size = sum(tensor.nbytes for layer in layers for tensor in compat.held_by(layer))
            self.stack.keep_newest(self.options.budget - size, batch, new)

    def observe(self, given: LayerInputs) -> None:
        self.index.append(*places(self._family, given, self._mask, self.index), given.ids)
        # A decode step on a GPU asks the device nothing.
        asked = given.x.shape[1] > 1 or given.x.device.type == "cpu"
        if given.rope is not None and not self.stack.keeps_rotated and asked:
            check_rope(self._family, self.attachment.view.rope.halves(given.rope), self.index)

    def _take(self, layer: CompressedLayer, inputs: AttentionInputs) -> Route:
        check_not_recorded(inputs.key)
        self.stack.enter(layer)
        past, queries = layer.tokens > 0, inputs.x.shape[1]
        if not past:
            check_states(self._family, layer.codec, inputs, self.index)
        layer.append(inputs, hold=queries <= MOST_QUERIES)
        banded = self.options.through_store and self.method.tail > 0
        found = route(self.attachment.hooks[layer.codec.view.index], queries, past, alone=banded)
        if banded and found is Route.WHOLE:
            raise ValueError(
                f"{self._family} does not leave attention to transformers' attention function, which"
                " attend=store with recent tokens in full needs"
            )
        return found

    def attend(self, index: int, call: AttentionCall) -> Tensor | None:
        # Kernels take it that nobody sees a block of padding alone, and do not ask where its tokens stand.
        return None if self._shows_padding else self.stack.attend(index, call)

    def answer(
        self, index: int, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        layer: CompressedLayer = self.layers[index]
        return layer.read(key, value, mask)

    def latents(self, index: int, whole: bool = False) -> list[Exact | Coded]:
        layer: CompressedLayer = self.layers[index]
        return layer.latents(whole)

    def pass_over(self, batch: int, length: int) -> None:
        known = self.index.length
        again = (batch, length) == (self.index.batch, known + 1)
        if again and self.attachment.view.rope.switches and not self.note:
            self.note = (
                f"{self._family} ran on all {length} tokens anew without this cache, which holds {known}: its"
                " generate() does so where its rotary embedding changes to that of long inputs"
            )
            warnings.warn(self.note, stacklevel=2)

    def _complete(self) -> bool:
        self.stack.forget_pass()
        self._mask = PassMask()
        if self.contents.others or self.linear_states:  # they may have grown since the pass began
            self._make_room(self.index.batch, 0, self.contents)
        return self.stack.complete(self._begun.tokens)

    # -- copies ---------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> "KVCache":
        """A cache of its own for the same model, which is how a prompt's cache is used again."""
        for shared in (self.attachment, self.options, self.codecs):
            memo[id(shared)] = shared
        other = memo[id(self)] = object.__new__(type(self))
        self._undo()
        self.stack.forget_unsealed()  # both are the same afterwards
        copy.deepcopy(self.stack, memo)  # first: it knows what copies share
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other

    # -- bytes ---------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of the whole cache, layers that are not compressed included."""
        return self.report().cache_bytes

    def report(self) -> Report:
        """What the cache holds, in bytes; cheap enough to call at any time.

        Examples:
            >>> cache = KVCache(model, "kivi-4bit")
            >>> _ = model(**prompt, cache=cache)
            >>> cache.report().tokens, cache.report().code_bits
            (300, 4.0)
        """
        return report_of(self.contents, self.get_seq_length(), self.kernel, self.note)
