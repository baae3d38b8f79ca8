"""Shapes of known models, configurations by name, and models without weights."""

import json
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from .. import compat
from ..catalogue import did_you_mean
from ..hub import PACKAGED, check_model, hub_answers
from ..models import layers_of, view_model
from ..models.weights import message_of
from ..positions import positions_of
from .weights import Quantization, quantization_of, stored_nbytes

SHAPES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
"""What people run, the models of the papers' tables and the packaged ones, as a ``model_type`` and the
arguments of its configuration. The sizes are those of the models' own ``config.json``; of models that also
see, those of the part that writes. Mistral 7B is built as Llama is. "tiny" is no known model: it is for
trying out commands that take a shape."""


def shape_config(name: str, **changed: Any) -> Any:
    """The configuration of a known model, with other arguments where some are ``changed``.

    Raises:
        ValueError: no such shape.
    """
    from transformers import AutoConfig

    if name not in SHAPES:
        raise ValueError(f"no shape '{name}': one of {', '.join(SHAPES)}{did_you_mean(name, SHAPES)}")
    return AutoConfig.for_model(**{**SHAPES[name], **changed})


def load_config(name: str) -> Any:
    """The configuration of a folder, a hub id or a packaged model; no weights are read.

    Raises:
        ValueError: no such model, or a folder without a configuration.
    """
    from transformers import AutoConfig

    if name in PACKAGED:
        return shape_config(name)
    check_model(name)
    folder = Path(name)
    kept = not folder.exists() and not hub_answers()
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False, local_files_only=kept)
    except (OSError, ValueError, KeyError) as error:
        if folder.exists():
            reason = message_of(error)[:160]
            raise ValueError(f"cannot read '{folder / 'config.json'}': {reason}") from error
        raise ValueError(
            f"no configuration of '{name}': not a folder, not one of {', '.join(PACKAGED)}, and not to"
            " be had from the hub"
        ) from error


class Skeleton:
    """A model without its weights: the modules that a configuration asks for, on torch's meta device.

    Args:
        dtype: of states, and of the weights that are not quantized.
        weights_bits: the bits of weights in linear layers, in place of what the configuration says.

    Raises:
        ValueError: no causal language model, or one of a family that cannot be served.
    """

    def __init__(self, config: Any, dtype: torch.dtype, weights_bits: float | None = None) -> None:
        from transformers import AutoModelForCausalLM

        self._config, self._weights_bits = config, weights_bits
        try:
            with torch.device("meta"):
                self.model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
        except ValueError as error:
            kind = type(config).__name__
            raise ValueError(f"no causal language model is made of a {kind}") from error
        # Some kinds of RoPE look at the positions, which must then be numbers.
        for module in self.model.modules():
            rotary: Any = getattr(module, "rotary_emb", None)
            if hasattr(rotary, "config"):
                module.rotary_emb = type(rotary)(rotary.config)
        self.view = view_model(self.model)
        self._held_uncompressed = cache(self._uncompressed)

    @property
    def parameters(self) -> int:
        """The number of parameters; tied ones count once."""
        return sum(p.numel() for p in self.model.parameters())

    @cached_property
    def quantization(self) -> Quantization | None:
        """How the weights are stored; None where they are all in the skeleton's dtype.

        Raises:
            ValueError: a quantization whose bytes are not known.
        """
        return quantization_of(self._config, self._weights_bits)

    @cached_property
    def _stored(self) -> dict[int, int]:
        return stored_nbytes(self.model, self.quantization)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the weights, as they are stored."""
        return sum(self._stored.values())

    @property
    def weights(self) -> str:
        """What the weights are, in words."""
        dtype = str(self.model.dtype).removeprefix("torch.")
        return dtype if self.quantization is None else f"{self.quantization}, the rest {dtype}"

    def nbytes_at(self, bits: float) -> int:
        """Bytes of the weights if linear layers had so many bits."""
        return sum(stored_nbytes(self.model, quantization_of(None, bits)).values())

    @property
    def positions(self) -> int | None:
        """See `positions_of`."""
        return positions_of(self.model)

    def layer_nbytes(self, index: int) -> int:
        """Bytes of the weights of one decoder layer."""
        layers = list(layers_of(self.view.decoder))
        return sum(self._stored[id(p)] for p in layers[index].parameters())

    def skipped_nbytes(self, context: int) -> int:
        """Bytes of one sequence in the layers that are not compressed, as transformers' own cache holds
        it, and of the states that layers have beside keys and values.

        Raises:
            ValueError: layers have states whose sizes cannot be found without weights.
        """
        return self._held_uncompressed(context)[0]

    def skipped_values(self, context: int) -> int:
        """The same in numbers, of any dtype."""
        return self._held_uncompressed(context)[1]

    def _uncompressed(self, context: int) -> tuple[int, int]:
        """Bytes and numbers."""
        own = compat.default_layers(compat.text_config(self.model))
        held = [state for layer in self.stateful for state in compat.states_in(layer)]
        for view in self.view.layers:
            if view.index in self.view.skipped:
                layer = own[view.index]
                layer.update(
                    *(
                        torch.empty(1, view.kv_heads, context, size, dtype=view.dtype, device="meta")
                        for size in (view.head_size, view.value_size)
                    )
                )
                held += layer.keys, layer.values
        return sum(tensor.nbytes for tensor in held), sum(tensor.numel() for tensor in held)

    @cached_property
    @torch.no_grad()
    def stateful(self) -> list[Any]:
        """Of a cache of transformers' own, the layers that hold states of linear attention and convolutions,
        after a pass of one token of one sequence, which gives these their sizes.

        Raises:
            ValueError: it cannot be computed without weights.
        """
        cache = compat.default_cache(compat.text_config(self.model))
        if not any(map(compat.has_state, cache.layers)):
            return []
        compat.compute_experts_together(self.model)
        token = torch.zeros(1, 1, dtype=torch.long, device="meta")
        try:
            self.view.decoder(token, **{compat.CACHE: cache}, use_cache=True)
        except Exception as error:  # whatever a layer does that needs numbers
            family, reason = type(self.model).__name__, message_of(error)[:160]
            raise ValueError(
                f"the states that layers of {family} keep cannot be counted without its weights: {reason}"
            ) from error
        return [layer for layer in cache.layers if compat.has_state(layer)]
