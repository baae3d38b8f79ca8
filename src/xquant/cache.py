"""KVCache: the compressed cache that a model's ``generate`` and ``forward`` take."""

import copy
import warnings
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from . import compat
from .calibration import Calibration
from .changes import ChangingCache
from .contents import Contents
from .kernels.backend import MOST_QUERIES
from .kernels.call import AttentionCall
from .methods import AttentionInputs, LayerCodec, Method
from .report import Report, report_of
from .saved.resting import RestingCache
from .seam.check import check_input, check_not_recorded, check_rope, check_states, places
from .seam.gradients import past_is_constant, without_gradients
from .seam.hooks import Attachment, attached
from .seam.masks import SHOWN, PassMask
from .seam.passes import Given, ObservingCache
from .snapshot import Snapshot
from .spec import parse_method
from .stack import LayerStack
from .store.built import States
from .store.layer import CompressedLayer
from .store.offload import is_host

ATTEND = ("chunk", "store")


class KVCache(ChangingCache, ObservingCache, RestingCache):
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
            ``"avx512"``, ``"avx2"``, ``"folded"`` and ``"reference"`` ask for one; with the last two torch
            packs blocks too, to the same bits.
        offload: ``"cpu"`` keeps sealed blocks in host memory, and brings those of a layer to the device while
            the layer before computes. Tokens in full stay on the device.

    Raises:
        ValueError: unknown method or option, a kernel that cannot be used, a calibration that is missing
            or made for something else, or a model that cannot be served; the message says why.
        OSError: the calibration's file cannot be read.
        TypeError: ``model`` is not a transformers model.

    Examples:
        >>> cache = KVCache(model, "kivi-4bit")
        >>> out = model.generate(**inputs, past_key_values=cache, max_new_tokens=8)
        >>> out.shape[1] - cache.get_seq_length()  # the newest token has not been read yet
        1
    """

    attachment: Attachment
    traceable = True

    def __init__(
        self,
        model: nn.Module,
        method: str | Method,
        attend: str = "chunk",
        calibration: Calibration | str | PathLike[str] | None = None,
        kernel: str = "auto",
        offload: str | None = None,
    ) -> None:
        if isinstance(model, str | Method):
            raise TypeError(
                f"a transformers model is needed, not {type(model).__name__}: the model comes first,"
                " KVCache(model, method)"
            )
        self.method = parse_method(method)
        if attend not in ATTEND:
            raise ValueError(f"attend is {' or '.join(ATTEND)}, not '{attend}'")
        if attend == "store" and not self.method.causal:
            raise ValueError(
                f"{self.method.spec} {self.method.not_causal}, so what it stores of a token is not known when"
                " the token attends to itself: it can generate, but not attend to the store alone"
            )
        if isinstance(calibration, str | PathLike):
            calibration = Calibration.load(calibration)
        self._through_store = attend == "store"
        self._calibration, self._kernel, self._offload = calibration, kernel, offload
        with attached(model) as self.attachment:
            super().__init__(layers=compat.default_layers(self._config))
            self._forget_states(self.layers)
            self._build(self.attachment.codecs.of(self.method, calibration))
        self._begun: Snapshot | None = None
        self._mask, self._shows_padding = PassMask(), False
        self.note: str = ""
        """Why the model no longer uses this cache, where it has been seen that it does not."""
        self.saved_tokens: Tensor | None = None
        """Of a cache that was loaded: the ids ``[B, T]`` that it was saved with, int64 on the CPU."""

    @property
    def _config(self) -> Any:
        return compat.text_config(self.attachment.view.model)

    def _build(self, codecs: list[LayerCodec]) -> None:
        """Make the compressed layers, empty, and what attends over them."""
        view = self.attachment.view
        if view.rope.drifts and not all(codec.rotated for codec in codecs):
            raise ValueError(
                f"{self._family} turns keys by other angles for every length (dynamic NTK), and what"
                f" {self.method.spec} keeps before RoPE would lose them: use a method that keeps keys after,"
                " such as kivi-4bit:rope=post"
            )
        for codec in codecs:
            of_states = codec.keeps_states
            codec.view.require(not codec.rotated or not of_states, not of_states)
        self._check_offload(codecs)
        options = self._through_store, self._kernel, self._offload is not None
        self.stack = LayerStack(codecs, self.method, view.rope, *options)
        for layer in self.stack.layers:
            self.layers[layer.codec.view.index] = layer

    def _check_offload(self, codecs: list[LayerCodec]) -> None:
        if self._offload not in (None, "cpu"):
            raise ValueError(f"offload is None or 'cpu', not '{self._offload}'")
        if self._offload and any(codec.mixes for codec in codecs):
            raise ValueError(
                f"blocks of {self.method.spec} cannot be offloaded: it codes layers together"
            )
        if self._offload and any(is_host(codec.view.device) for codec in codecs):
            raise ValueError("offload=cpu needs a model on a device: this one is in host memory")

    @property
    def kernel(self) -> str:
        """What attends over the compressed layers, and why nothing faster does."""
        self.attachment.see_implementation()  # another implementation may have been set since
        names = dict.fromkeys(
            str(choice) if hooks.hands_over is not False else hooks.why_whole
            for choice, hooks in (
                (self.stack.choices[index], hooks) for index, hooks in self.attachment.hooks.items()
            )
        )
        return ", ".join(names)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """How many tokens a mask covers, and the first: of a layer's past and ``query_length`` new ones."""
        if self._begun is None or not isinstance(self.layers[layer_idx], CompressedLayer):
            sizes: tuple[int, int] = super().get_mask_sizes(query_length, layer_idx)
            return sizes
        return self._begun.tokens + query_length, 0

    @property
    def _family(self) -> str:
        return type(self.attachment.view.model).__name__

    @property
    def contents(self) -> Contents:
        """What the cache holds, for what saves, converts and reports it."""
        return Contents(self.attachment, self.method, self.stack, self.layers, self.beside)

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

    def snapshot(self) -> Snapshot:
        """What `restore` needs to bring back the tokens of now; copies nothing that is compressed."""
        self._undo()
        return Snapshot.of(self.contents)

    def restore(self, state: Snapshot) -> None:
        state.bring_back(self.contents)
        self.stack.forget_pass()
        self._begun, self._mask = None, PassMask()

    def _undo(self) -> None:
        """Undo a forward pass that was interrupted: no hook runs for KeyboardInterrupt."""
        if self._begun is not None:
            self.restore(self._begun)

    def begin(self, batch: int, length: int, mask: PassMask) -> None:
        self._undo()
        check_input(batch, length, mask, self.index.batch, self.index.length)
        if self.index.length == 0:
            self._refresh()
        self.stack.forget_unsealed()
        self._mask = mask
        held = self.index.length > 0 and mask.asks(length, self.index.real.device)
        self._shows_padding = held and mask.shows_padding(self.index.real)
        if self._shows_padding:
            warnings.warn(SHOWN, stacklevel=2)
        self.note = ""
        self._begun = Snapshot.of(self.contents)

    def _refresh(self) -> None:
        """Build an empty cache anew where the model's weights, dtype or device have changed."""
        codecs = self.attachment.codecs.of(self.method, self._calibration, thoroughly=True)
        if codecs is not self.stack.codecs:
            self._build(codecs)

    def observe(self, given: Given) -> None:
        self.index.append(*places(self._family, given, self._mask, self.index), given.ids)
        # A decode step on a GPU asks the device nothing.
        asked = given.x.shape[1] > 1 or given.x.device.type == "cpu"
        if given.rope is not None and not self.stack.keeps_rotated and asked:
            check_rope(self._family, self.attachment.view.rope.halves(given.rope), self.index)

    def _append(self, layer: CompressedLayer, inputs: AttentionInputs) -> None:
        if layer.get_seq_length() == 0:
            check_states(self._family, layer.codec, inputs, self.index)
        layer.append(inputs, hold=inputs.x.shape[1] <= MOST_QUERIES)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> States:
        """Store a layer's new states, as the model's attention calls it.

        Returns what the attention function expects: the new states where ours will ask the cache for
        the rest, otherwise the keys and values of the whole context, ``[B, G, T, D]``.

        Raises:
            ValueError: called by another model than the cache was made for, outside a forward pass, or
                while a CUDA graph is recorded; NaN in the hidden states.
        """
        layer = self.layers[layer_idx]
        if not isinstance(layer, CompressedLayer):
            own: States = layer.update(key_states, value_states, *args, **kwargs)
            return own
        if torch.compiler.is_dynamo_compiling():
            return self.attachment.trace(layer_idx, key_states, value_states)
        check_not_recorded(key_states)
        self.stack.enter(layer)
        with without_gradients():
            self._append(layer, self.attachment.inputs(layer_idx, key_states, value_states))
        hooks = self.attachment.hooks[layer_idx]
        hands_over = hooks.hands_over
        if hooks.absorbs and not torch.is_grad_enabled():
            past = layer.get_seq_length() - key_states.shape[2]
            if past and key_states.shape[2] <= MOST_QUERIES:
                return self.attachment.hand(layer_idx, key_states, value_states, whole=False)
        banded = self._through_store and self.method.tail > 0
        if hands_over or (hands_over is None and banded):
            return self.attachment.hand(layer_idx, key_states, value_states, whole=False)
        if banded:
            raise ValueError(
                f"{self._family} does not leave attention to transformers' attention function, which"
                " attend=store with recent tokens in full needs"
            )
        with torch.no_grad():
            view = layer.codec.view
            key, value, _ = layer.read(view.as_in_cache(key_states), value_states, None)
            key = view.as_in_model(key)
        if layer.get_seq_length() > key_states.shape[2] or self._through_store:
            key, value = (
                past_is_constant(whole, new)
                for whole, new in ((key, key_states), (value, value_states))
            )
        return self.attachment.hand(layer_idx, key, value, whole=True)

    def attend(self, index: int, call: AttentionCall) -> Tensor | None:
        # Kernels take it that nobody sees a block of padding alone, and do not ask where its tokens stand.
        return None if self._shows_padding else self.stack.attend(index, call)

    def answer(
        self, index: int, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        layer: CompressedLayer = self.layers[index]
        return layer.read(key, value, mask)

    def latents(self, index: int) -> States:
        layer: CompressedLayer = self.layers[index]
        return layer.states()

    def pass_over(self, batch: int, length: int) -> None:
        known = self.index.length
        again = (batch, length) == (self.index.batch, known + 1)
        if again and self.attachment.view.rope.switches and not self.note:
            self.note = (
                f"{self._family} ran on all {length} tokens anew without this cache, which holds {known}: its"
                " generate() does so where its rotary embedding changes to that of long inputs"
            )
            warnings.warn(self.note, stacklevel=2)

    @torch.no_grad()
    def finish(self, failed: bool = False) -> None:
        """End a forward pass: one that ``failed``, or fails here, leaves the cache as it was before.

        Raises:
            ValueError: NaN or infinity in the hidden states, where they were not asked about before.
        """
        self.stack.forget_pass()
        begun = self._begun
        if begun is None:
            return
        try:
            complete = not failed and self.stack.complete(begun.tokens)
        except BaseException:
            self.restore(begun)
            raise
        if not complete:
            self.restore(begun)
        self._begun, self._mask = None, PassMask()

    # -- copies ---------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> "KVCache":
        """A cache of its own for the same model, which is how a prompt's cache is used again."""
        memo[id(self.attachment)] = self.attachment
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
            >>> _ = model(**prompt, past_key_values=cache)
            >>> cache.report().tokens, cache.report().code_bits
            (300, 4.0)
        """
        return report_of(self.contents, self.get_seq_length(), self.kernel, self.note)
