"""What transformers calls the parts of a decoder, where a name is all that tells."""

from collections.abc import Iterator
from typing import Any

from torch import nn

LISTS = ("layers", "h", "blocks", "layer")
ATTENTIONS = (
    "self_attn",
    "attn",
    "attention",
    "self_attention",
    "mixer",
    "multi_head_attention",
    "temporal_block",
    "self",
)
NORMS = ("input_layernorm", "ln_1", "self_attn_layer_norm", "norm_1", "norm", "temporal_pre_norm")
"""The norm of the input of attention. A layer in which none is found counts as one without a norm: what is
stored is right then, too, but deltas of the residual stream are taken of the norm's output instead."""
FINAL_NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm", "final_norm", "norm_f")
"""The norm of the output of the last layer. Where none is found, it counts as a part of that layer."""
LENDS = "store_full_length_kv"
"""An attribute of attention that is True where layers above read this layer's keys and values, too (Gemma 3n
and 4)."""
ROTARY = ("rotary_emb", "pos_emb", "rotary_pos_emb", "rotary_embedding")


def layers_of(module: nn.Module) -> Iterator[Any]:
    """The layers of a decoder; of any other module perhaps none."""
    lists = (getattr(module, name, None) for name in LISTS)
    yield from next((found for found in lists if isinstance(found, nn.ModuleList)), ())


def attentions(decoder: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Each layer of ``decoder`` that may attend, with its attention, which knows its place in a cache."""
    for layer in layers_of(decoder):
        attention = first(layer, ATTENTIONS)
        inner = first(attention, ATTENTIONS)  # BERT and GPT-Neo have it one deeper
        for found in (attention, inner):
            if hasattr(found, "layer_idx") or hasattr(found, "layer_id"):
                yield layer, found
                break


def place_of(attention: Any) -> int:
    """Which layer of a cache is an attention's; -1 where it does not know."""
    place = first(attention, ("layer_idx", "layer_id"))
    return place if isinstance(place, int) else -1


def module_of(parent: Any, names: tuple[str, ...]) -> nn.Module | None:
    """The part of ``parent`` that has one of these names; None where there is none."""
    found = first(parent, names)
    return found if isinstance(found, nn.Module) else None


def first(module: Any, names: tuple[str, ...]) -> Any:
    found = (getattr(module, name, None) for name in names)
    return next((each for each in found if each is not None), None)
