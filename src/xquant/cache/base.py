"""CompressedCache: what every form of a compressed cache does in a forward pass, in order.

A pass begins with a snapshot, and every failure, interruption or refusal brings that back. A form says how it
keeps new states, what it decodes, and what its kernels read.
"""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from .. import compat
from ..contents.options import CacheOptions
from ..kernels.choose import Choice, prompts_of
from ..kernels.prompts import PromptAttention
from ..methods import AttentionInputs, Full, Method
from ..past.built import States
from ..seam.check import check_input
from ..seam.gradients import past_is_constant, without_gradients
from ..seam.hooks import Attachment, attached
from ..seam.masks import PassMask
from ..seam.passes import ObservingCache, Route
from ..seam.route import described


class CompressedCache(Cache, ObservingCache):
    """A cache of one model, whose layers of attention are compressed by one method.

    Args:
        model: a causal language model of transformers. The cache sets hooks on it.
        options: how it compresses.

    Raises:
        ValueError: a kernel that cannot be used, a calibration that is missing or made for something else, or
            a model or a method that cannot be served in this form.
        TypeError: ``model`` is not a transformers model.
    """

    attachment: Attachment
    traceable = True

    def __init__(self, model: nn.Module, options: CacheOptions) -> None:
        self.options = options
        self._begun: Any = None
        """What `restore` needs to undo the pass that runs; None between passes."""
        with attached(model) as self.attachment:
            super().__init__(layers=compat.default_layers(self._config))
            self.codecs = self.attachment.codecs.of(self.method, options.calibration)
            """Of the compressed layers, bottom up."""
            self._build()

    def _check_model(self, model: nn.Module) -> None:
        """Raise TypeError where a method stands in the place of a ``model``."""
        if isinstance(model, str | Method):
            raise TypeError(
                f"a transformers model is needed, not {type(model).__name__}: the model comes first,"
                f" {type(self).__name__}(model, method)"
            )

    @property
    def method(self) -> Method:
        """What compresses the layers."""
        return self.options.method

    @property
    def _config(self) -> Any:
        """Of the decoder."""
        return compat.text_config(self.attachment.view.model)

    @property
    def _family(self) -> str:
        return type(self.attachment.view.model).__name__

    @property
    def prompts(self) -> PromptAttention | None:
        """The full cache has none: others are compared with it, and it gives what the model does."""
        return None if isinstance(self.method, Full) else prompts_of(self.options.kernel)

    @property
    def kernel(self) -> str:
        """What attends over the compressed layers, and why nothing faster does."""
        self.attachment.see_implementation()  # another implementation may have been set since
        hooks = self.attachment.hooks
        descriptions = (described(hooks[index], choice) for index, choice in self.choices.items())
        return ", ".join(dict.fromkeys(descriptions))

    # -- what a form says of itself ----------------------------------------------------------------

    @abstractmethod
    def _build(self) -> None:
        """Make the compressed layers of `codecs`, empty."""

    @property
    @abstractmethod
    def choices(self) -> dict[int, Choice]:
        """Which backend attends over a layer, and why, by the layer's number in the model."""

    @property
    @abstractmethod
    def _held(self) -> tuple[int, int]:
        """Sequences, 0 where there are none, and tokens of each that the compressed layers hold."""

    @abstractmethod
    def _state(self) -> Any:
        """What `restore` needs to bring back the tokens of now."""

    @abstractmethod
    def _start(self, batch: int, length: int, mask: PassMask) -> None:
        """Be ready for a pass that was checked."""

    @abstractmethod
    def _take(self, layer: Any, inputs: AttentionInputs) -> Route:
        """Keep a layer's new states, as far as that is done before it attends. Returns who does."""

    @abstractmethod
    def _complete(self) -> bool:
        """Seal what is due, now that the pass has succeeded. False where layers were left out."""

    @abstractmethod
    def _forget_pass(self) -> None:
        """Forget what holds for one forward pass only."""

    # -- a forward pass ----------------------------------------------------------------------------

    def snapshot(self) -> Any:
        """What `restore` needs to bring back the tokens of now; copies nothing that is compressed."""
        self._undo()
        return self._state()

    def _undo(self) -> None:
        """Undo a forward pass that was interrupted: no hook runs for KeyboardInterrupt."""
        if self._begun is not None:
            self.restore(self._begun)

    def begin(self, batch: int, length: int, mask: PassMask) -> Any:
        self._undo()
        sequences, held = self._held
        check_input(batch, length, mask, sequences, held)
        if not held:
            self._refresh()
        begun = self._state()
        self._start(batch, length, mask)
        self._begun = begun
        return begun

    def _refresh(self) -> None:
        """Build an empty cache anew where the model's weights, dtype or device have changed."""
        codecs = self.attachment.codecs.of(self.method, self.options.calibration, thoroughly=True)
        if codecs is not self.codecs:
            self.codecs = codecs
            self._build()

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """How many tokens a mask covers, and the first: of a layer's past and ``query_length`` new ones."""
        if layer_idx in self.attachment.hooks:
            return self.get_seq_length(layer_idx) + query_length, 0
        sizes: tuple[int, int] = super().get_mask_sizes(query_length, layer_idx)
        return sizes

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> States:
        """Store a layer's new states, as the model's attention calls it.

        Returns what the attention function expects: the new states where ours will ask the cache for
        the rest, otherwise the keys and values of the whole context, ``[B, G, T, D]``.

        Raises:
            ValueError: called by another model than the cache was made for, or outside a forward pass; NaN
                in the hidden states.
        """
        layer = self.layers[layer_idx]
        if layer_idx not in self.attachment.hooks:
            own: States = layer.update(key_states, value_states, *args, **kwargs)
            return own
        if torch.compiler.is_dynamo_compiling():
            return self.attachment.trace(layer_idx, key_states, value_states, self._traced_mark)
        inputs = self.attachment.inputs(layer_idx, key_states, value_states)
        with without_gradients():
            taken = self._take(layer, inputs)
        if taken is not Route.WHOLE:
            return self.attachment.return_states(layer_idx, key_states, value_states, taken)
        with torch.no_grad():
            key, value, _ = self.answer(layer_idx, inputs.key, inputs.value, None)
            key = layer.codec.view.as_in_model(key)
        if self.get_seq_length(layer_idx) or self.options.through_store:
            key, value = past_is_constant(key, key_states), past_is_constant(value, value_states)
        return self.attachment.return_states(layer_idx, key, value, taken)

    @property
    def _traced_mark(self) -> Tensor | None:
        """Of a cache in which a compiled step attends in place: see `LayerPass`."""
        return None

    @torch.no_grad()
    def finish(self, failed: bool = False) -> None:
        """End a forward pass: one that ``failed``, or fails here, leaves the cache as it was before.

        Raises:
            ValueError: NaN or infinity in the hidden states, where they were not asked about before.
        """
        begun = self._begun
        if begun is None:
            self._forget_pass()
            return
        try:
            complete = not failed and self._complete()
        except BaseException:
            self.restore(begun)
            raise
        if complete:
            self._begun = None
        else:
            self.restore(begun)

    # -- changes -----------------------------------------------------------------------------------

    def _length_after(self, tokens_to_remove: int) -> int:
        """Of what `crop` leaves: ``-n`` removes ``n`` tokens, a positive number is the length to keep."""
        _, length = self._held
        keep = length + tokens_to_remove if tokens_to_remove < 0 else tokens_to_remove
        if tokens_to_remove == 0 and not compat.CROP_ZERO_EMPTIES:
            keep = length
        return min(max(keep, 0), length)
