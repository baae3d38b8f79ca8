"""What methods have in common that keep keys and values: KIVI, AsymKV, cross-layer XQuant, KVQuant and the
plain formats with a quantizer for each, transform coding together, the uncompressed cache as they are."""

import torch
from torch import Tensor

from ..models import AttentionView
from ..quant import Plain, Quantizer, Segment
from .codec import AttentionInputs, LayerCodec
from .cost import NOTHING, RebuildCost


def flat_heads(states: Tensor) -> Tensor:
    """``[B, G, T, D]`` to token-major ``[B, T, G*D]``."""
    return states.transpose(1, 2).flatten(2)


def states_of(codec: LayerCodec, inputs: AttentionInputs) -> Tensor:
    """The model's own keys (before RoPE unless the codec is `rotated`) and values, side by side:
    ``[B, T, 2 G D]``."""
    key = flat_heads(inputs.key) if codec.rotated else codec.view.finish_keys(inputs.raw_key)
    return torch.cat([key, flat_heads(inputs.value)], -1)


class StateCodec(LayerCodec):
    """Keeps keys (before RoPE unless `rotated`) and values as they are, side by side: ``W = 2 G D``."""

    keeps_states = True

    def __init__(self, view: AttentionView) -> None:
        super().__init__(view)
        self.width = view.state_width

    def features(self, inputs: AttentionInputs) -> Tensor:
        return states_of(self, inputs)

    def exact(self, features: Tensor) -> tuple[Tensor, Tensor]:
        return features[..., : self.view.kv_width], features[..., self.view.kv_width :]

    def rebuild(self, recalled: Tensor) -> tuple[Tensor, Tensor]:
        return self.exact(recalled)

    @property
    def rebuild_cost(self) -> RebuildCost | None:
        return NOTHING


class KeyValueCodec(StateCodec):
    """Keys (before or after RoPE) and values of a layer, a segment each.

    A key bias is taken out before quantizing and added back, where keys are kept before RoPE and the
    family has no key norm: the large bias of Qwen2 would cost fp16 zero points their precision.
    """

    packs_states = True

    def __init__(
        self,
        view: AttentionView,
        keys: Quantizer,
        values: Quantizer,
        rope: str,
        shared: tuple[bool, bool] = (False, False),
    ) -> None:
        super().__init__(view)
        self.rotated = self.rotated or rope == "post"
        self.segments = (
            Segment(view.kv_width, keys.tiled(view.head_size, "tokens"), shared[0]),
            Segment(
                view.state_width - view.kv_width,
                values.tiled(view.value_size, "channels"),
                shared[1],
            ),
        )
        centred = not self.rotated and view.key_norm is None and not isinstance(keys, Plain)
        self.offset = view.key_bias if centred else None

    def encode(self, features: Tensor, predicted: Tensor | None) -> Tensor:
        if self.offset is None:
            return features
        key, value = self.exact(features)
        return torch.cat([key - self.offset, value], -1)

    def rebuild(self, recalled: Tensor) -> tuple[Tensor, Tensor]:
        key, value = self.exact(recalled)
        return (key if self.offset is None else key + self.offset), value
