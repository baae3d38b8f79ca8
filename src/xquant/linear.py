"""Linear layers of a CPU in oneDNN's own layout, which multiplies one row up to twice as fast.

A decode step multiplies every weight with one row, so it takes as long as reading the weights takes. Where
they lie row by row, torch reads them at half the memory's bandwidth. oneDNN reads blocks of them in order.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import compat
from .models import view_model
from .operators import operator

DTYPES = torch.float32, torch.bfloat16
ROWS = 512
"""oneDNN is asked for the layout for so many rows: it is as fast on one as the layout for one."""


def pack_weights(model: nn.Module) -> None:
    """Keep the weights of ``model``'s linear layers in oneDNN's own layout, for faster decoding on a CPU.

    Outputs are the same: in bfloat16 to the bit, in float32 but for the order of sums. Weights take no more
    memory, except that those of a tied output layer are no longer shared with the embedding. Key and value
    projections stay as they are, since methods read them. `state_dict` and `save_pretrained` give ordinary
    weights. Gradients do not reach packed weights. Layers that are packed already stay so.

    Args:
        model: a causal language model of transformers on the CPU, in float32 or bfloat16.

    Raises:
        TypeError: ``model`` is not a transformers model.
        ValueError: this build of torch has no oneDNN, or the model cannot be served.

    Examples:
        >>> from xquant import pack_weights, unpack_weights
        >>> before = model(**inputs).logits
        >>> pack_weights(model)
        >>> torch.allclose(model(**inputs).logits, before, atol=1e-4)
        True
        >>> unpack_weights(model)
    """
    if not torch.backends.mkldnn.is_available():
        raise ValueError("weights are packed by oneDNN, which this build of torch does not have")
    model = compat.uncompiled(model)
    read = set(_read_by_methods(model))
    for module in model.modules():
        own = "forward" in vars(module)  # accelerate's, which also brings offloaded weights in
        if type(module) is nn.Linear and module not in read and _packs(module.weight) and not own:
            PackedLinear.take(module)


def unpack_weights(model: nn.Module) -> None:
    """Undo `pack_weights`: weights are parameters again. A tied output layer has a copy of its own; call
    ``model.tie_weights()`` to share it again.

    Examples:
        >>> from xquant import pack_weights, unpack_weights
        >>> pack_weights(model)
        >>> unpack_weights(model)
        >>> type(model.lm_head).__name__
        'Linear'
    """
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.give_back()


def packed_bytes(model: nn.Module) -> int:
    """Bytes of the weights that are packed, which are no parameters."""
    return sum(m.packed.nbytes for m in model.modules() if isinstance(m, PackedLinear))


def _packs(weight: Tensor) -> bool:
    dense = type(weight) is nn.Parameter  # torchao's are subclasses
    return dense and weight.device.type == "cpu" and weight.dtype in DTYPES


def _read_by_methods(model: nn.Module) -> Iterator[nn.Module]:
    """The modules whose weights methods read."""
    for layer in view_model(model).layers:
        yield from (layer.key_module, layer.value_module)
        if layer.unknown_keys or layer.unknown_values or layer.latents is not None:
            yield from layer.module.modules()


class PackedLinear(nn.Linear):
    """A linear layer with a packed weight. An ``nn.Linear`` becomes one in place, so that its hooks stay."""

    packed: Tensor

    @staticmethod
    def take(module: nn.Module) -> None:
        """Make a packed layer of an ``nn.Linear``."""
        weight = module._parameters.pop("weight")
        assert weight is not None
        module.__class__ = PackedLinear
        module.packed = _pack(weight)

    def give_back(self) -> None:
        """Be an ``nn.Linear`` again."""
        weight = self.weight
        del self.packed
        self.__class__ = nn.Linear  # type: ignore[assignment]
        self.register_parameter("weight", nn.Parameter(weight))

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """A copy ``[N, C]``, unpacked."""
        return self.packed.to_dense()

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled() and input.requires_grad:
            return F.linear(input, self.weight, self.bias)
        multiply = _operator if torch.compiler.is_dynamo_compiling() else _multiply
        rows: Tensor = multiply(input.reshape(-1, self.in_features), self.packed, self.bias)
        return rows.view(*input.shape[:-1], self.out_features)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PackedLinear":
        weight = fn(self.weight)
        if not _packs(nn.Parameter(weight)):
            raise ValueError(
                f"packed weights stay on the CPU, in float32 or bfloat16, not {weight.dtype} on"
                f" {weight.device}: unpack_weights(model) first"
            )
        super()._apply(fn, recurse)
        self.packed = _pack(weight)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "packed": self.weight}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "packed": _pack(state["packed"])})


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), ROWS)
    return packed


def _multiply(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


def _shape(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(len(x), len(packed))


_operator = operator("linear", "(Tensor x, Tensor packed, Tensor? bias) -> Tensor", _multiply, _shape)
"""`_multiply` as the compiler takes it, which packs weights by itself only where they are constants."""
