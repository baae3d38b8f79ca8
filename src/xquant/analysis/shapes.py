"""Shapes of known models, configurations by name, and models without weights."""

from functools import cache
from pathlib import Path
from typing import Any

import torch

from .. import compat
from ..hub import PACKAGED, check_model, hub_answers
from ..models import layers_of, view_model
from ..models.weights import message_of
from ..positions import positions_of

_SMOLLM2: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "dtype": "float32",
}


def _llama(
    size: tuple[int, int, int, int],
    kv_heads: int,
    vocabulary: int = 32000,
    positions: int = 2048,
    **more: Any,
) -> dict[str, Any]:
    """A decoder of Llama's kind, with heads of 128; ``size``: hidden, MLP, layers and query heads."""
    hidden, intermediate, layers, heads = size
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        **more,
    }


_7B, _13B = (4096, 11008, 32, 32), (5120, 13824, 40, 40)
_30B, _65B = (6656, 17920, 60, 52), (8192, 22016, 80, 64)
_8B, _70B = (4096, 14336, 32, 32), (8192, 28672, 80, 64)
# Sizes as in the models' own config.json. Mistral is built as Llama is.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-7b": _llama(_7B, 32),
    "llama-13b": _llama(_13B, 40),
    "llama-30b": _llama(_30B, 52),
    "llama-65b": _llama(_65B, 64),
    "llama-2-7b": _llama(_7B, 32, positions=4096),
    "llama-2-13b": _llama(_13B, 40, positions=4096),
    "llama-2-70b": _llama(_70B, 8, positions=4096),
    "llama-3-8b": _llama(_8B, 8, 128256, 8192),
    "llama-3-70b": _llama(_70B, 8, 128256, 8192),
    "llama-3.1-8b": _llama(
        _8B,
        8,
        128256,
        131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    ),
    "mistral-7b-v0.2": _llama(_8B, 8, positions=32768),
    "mistral-7b-v0.3": _llama(_8B, 8, 32768, 32768),
    "tiny": _llama((128, 256, 2, 4), 2, 256, 4096, head_dim=32),
    "smollm2": _SMOLLM2,
    "smollm2-mha": {**_SMOLLM2, "num_key_value_heads": 9},
}
"""The models of the papers' tables and the packaged ones, as arguments of ``LlamaConfig``. "tiny" is no known
model: it is for trying out commands that take a shape."""


def shape_config(name: str) -> Any:
    """The configuration of a known model.

    Raises:
        ValueError: no such shape.
    """
    from transformers import LlamaConfig

    if name not in SHAPES:
        raise ValueError(f"no shape '{name}': one of {', '.join(SHAPES)}")
    return LlamaConfig(**SHAPES[name])


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

    Raises:
        ValueError: no causal language model, or one of a family that cannot be served.
    """

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

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
        self._states: list[torch.Tensor] | None = None

    @property
    def parameters(self) -> int:
        """The number of parameters; tied ones count once."""
        return sum(p.numel() for p in self.model.parameters())

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, in the skeleton's dtype."""
        return sum(p.nbytes for p in self.model.parameters())

    @property
    def positions(self) -> int | None:
        """See `positions_of`."""
        return positions_of(self.model)

    def layer_nbytes(self, index: int) -> int:
        """Bytes of the weights of one decoder layer."""
        layers = list(layers_of(self.view.decoder))
        return sum(p.nbytes for p in layers[index].parameters())

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
        held = list(self._states_of(own))
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

    @torch.no_grad()
    def _states_of(self, own: list[Any]) -> list[torch.Tensor]:
        """The states of linear attention and convolutions of one sequence: what a pass of a token leaves."""
        if not any(map(compat.has_state, own)):
            return []
        if self._states is None:
            cache = compat.default_cache(compat.text_config(self.model))
            compat.compute_experts_together(self.model)
            token = torch.zeros(1, 1, dtype=torch.long, device="meta")
            try:
                self.view.decoder(token, **{compat.CACHE: cache}, use_cache=True)
            except Exception as error:  # whatever a layer does that needs numbers
                family, reason = type(self.model).__name__, message_of(error)[:160]
                raise ValueError(
                    f"the states that layers of {family} keep cannot be counted without its weights: {reason}"
                ) from error
            self._states = [
                state
                for layer in cache.layers
                if compat.has_state(layer)
                for state in compat.states_in(layer)
            ]
        return self._states
