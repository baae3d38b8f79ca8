"""Linear layers of a CPU whose weights are packed: in oneDNN's layout, or in fewer bits.

A decode step multiplies every weight with one row, so it takes as long as reading the weights takes.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from .. import compat
from ..models import view_model
from . import grouped, onednn
from .layer import PackedLinear

BITS = 4, 8
OUTPUT_BITS = 8


def pack_weights(model: nn.Module, bits: int | None = None) -> None:
    """Keep the weights of ``model``'s linear layers packed, for faster decoding on a CPU.

    Without ``bits`` they are in oneDNN's own layout. Outputs are the same: in bfloat16 to the bit, in float32
    but for the order of sums. Weights take no more memory, except that those of a tied output layer are no
    longer shared with the embedding. Key and value projections stay as they are, since methods read them.

    With ``bits`` they are rounded to the nearest code, in groups of 32 channels with a scale and of 4 bits a
    lowest number in fp16: 5.0 or 8.5 bits a weight. The output layer has 8 bits. Weights that came from a
    GGUF file of Q4_1 and Q8_0 are the same numbers, others lose what rounding costs. Layers whose channels
    are no multiple of 32 stay as they are.

    `state_dict` and `save_pretrained` give ordinary weights. Gradients do not reach packed weights. Layers
    that are packed already stay so.

    Args:
        model: a causal language model of transformers on the CPU, in float32 or bfloat16; with ``bits`` also
            in float16.
        bits: of a weight, 4 or 8; None: as they are.

    Raises:
        TypeError: ``model`` is not a transformers model.
        ValueError: ``bits`` are none of those, the model cannot be served, or oneDNN is missing, as is what
            it needs for bfloat16: AVX-512.

    Examples:
        >>> from xquant import pack_weights, unpack_weights
        >>> before = model(**inputs).logits
        >>> pack_weights(model)
        >>> float((model(**inputs).logits - before).abs().max()) < 1e-4
        True
        >>> unpack_weights(model)
    """
    if bits is not None and bits not in BITS:
        raise ValueError(f"weights are packed in 4 or 8 bits, not in {bits}")
    network: Any = compat.uncompiled(model)
    read = set(_read_by_methods(network))
    if bits is None and (why := onednn.why_not(network.dtype)):
        raise ValueError(why)
    output = network.get_output_embeddings()
    for module in network.modules():
        own = "forward" in vars(module)  # accelerate's, which also brings offloaded weights in
        if type(module) is not nn.Linear or own or type(module.weight) is not nn.Parameter:
            continue  # torchao's weights are of other types
        if bits is None:
            if module not in read and onednn.packs(module.weight):
                onednn.OneDnnLinear.take(module)
        elif grouped.packs(module.weight):
            grouped.GroupedLinear.take(module, bits=OUTPUT_BITS if module is output else bits)


def unpack_weights(model: nn.Module) -> None:
    """Undo `pack_weights`: weights are parameters again. A tied output layer has a copy of its own; call
    ``model.tie_weights()`` to share it again. What rounding to fewer bits lost stays lost.

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


def _read_by_methods(model: nn.Module) -> Iterator[nn.Module]:
    """The modules whose weights methods read."""
    for layer in view_model(model).layers:
        yield from (layer.key_module, layer.value_module)
        if layer.unknown_keys or layer.unknown_values or layer.latents is not None:
            yield from layer.module.modules()
