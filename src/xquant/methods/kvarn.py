from dataclasses import dataclass

from ..models import AttentionView
from ..quant import hadamard
from ..quant.scaled import Balanced
from .base import ROPE, Method, Tensors, option
from .rotated import RotatedCodec, both


@dataclass(frozen=True, kw_only=True)
class KVarN(Method):
    """KVarN (arXiv 2606.03458): heads are rotated by a Hadamard matrix, tokens and channels are scaled
    to equal variance, and the result is stored as integers.

    Stores codes of keys and values; an fp16 scale and zero for each channel of a key head and each token of a
    value head; and a second scale for each token of a key head and each channel of a value head: ``n G D (k +
    v) / 8 + 6 G D + 6 n G`` bytes in each layer for a block of n tokens.

    Differs from the paper: it does not say how many rounds of dividing are enough; here there are 16, as in
    its implementation for vLLM. Sinks are kept as in every other method.

    Examples:
        >>> from xquant import KVarN, parse_method
        >>> KVarN(key_bits=4, value_bits=2) == parse_method("kvarn-k4v2")
        True
    """

    name = "kvarn"
    paper = "KVarN, arXiv 2606.03458"
    summary = "rotated heads of even variance, uniform codes"
    example = "kvarn-k4v2"
    head_pattern = r"-k(?P<key_bits>\d)v(?P<value_bits>\d)"

    key_bits: int = option(help="bits of keys", choices=range(1, 9))
    value_bits: int = option(help="bits of values", choices=range(1, 9))
    rounds: int = option(16, "times that tokens and channels are divided by their deviation", least=1)
    rope: str = option("post", **ROPE)

    @property
    def head(self) -> str:
        return f"{self.name}-k{self.key_bits}v{self.value_bits}"

    def codec(self, view: AttentionView, position: int, found: Tensors) -> RotatedCodec:
        return RotatedCodec(
            view,
            Balanced(self.key_bits, "channel", view.head_size, self.rounds),
            Balanced(self.value_bits, "token", view.value_size, self.rounds),
            self.rope,
            both(view, hadamard),
            self.group,
        )
