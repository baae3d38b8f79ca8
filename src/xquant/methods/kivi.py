from dataclasses import dataclass

from ..models import AttentionView
from .base import BITS, ROPE, LayeredMethod, Tensors, option
from .key_value import KeyValueCodec
from .widths import Widths


@dataclass(frozen=True, kw_only=True)
class Kivi(LayeredMethod):
    """KIVI (arXiv 2402.02750), by default with keys before RoPE: KIVI* of arXiv 2508.10395.

    Stores K per channel in groups of g tokens and V per token in groups of g channels, b bits a code, with an
    fp16 scale and zero point for each group. With G key/value heads of size D that is
    ``n (2 G D b) / 8 + 4 G D + 4 n ceil(G D / g)`` bytes in each layer for a block of n = g tokens.

    Differs from the paper: K and V of recent tokens stay in the model's dtype until the tokens fill a block
    beyond the newest ``tail``, so ``tail`` to ``tail + g - 1`` tokens do. The bias of the key projection is
    subtracted before quantizing and added again when keys are read.

    Examples:
        >>> from xquant import Kivi, KVCache
        >>> Kivi(bits=2, tail=128, group=32, rope="post").spec  # the paper's setting
        'kivi-2bit:tail=128,group=32,rope=post'
        >>> cache = KVCache(model, Kivi(bits=4, value_bits=2))
        >>> _ = model(**prompt, cache=cache)
        >>> cache.report().code_bits
        3.0
    """

    name = "kivi"
    paper = "KIVI, arXiv 2402.02750"
    summary = "keys per channel, values per token, uniform codes"
    example = "kivi-2bit"
    beside_layers = LayeredMethod.beside_layers | {"key_bits": None, "value_bits": None}

    key_bits: int | None = option(None, "bits of keys where they differ from values'", choices=BITS)
    value_bits: int | None = option(None, "bits of values where they differ from keys'", choices=BITS)
    rope: str = option("pre", **ROPE)

    def layer_widths(self, position: int) -> Widths:
        keys, values = super().layer_widths(position)
        if self.layers or position < self.first_layers:
            return Widths(keys, values)
        return Widths(self.key_bits or keys, self.value_bits or values)

    def codec(self, view: AttentionView, position: int, found: Tensors) -> KeyValueCodec:
        keys, values = self.layer_widths(position)
        return KeyValueCodec(
            view,
            self.quantizer(keys, "channel", view.dtype),
            self.quantizer(values, "token", view.dtype),
            self.rope,
        )
