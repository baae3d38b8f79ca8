"""What is stored of layers that are not compressed: their numbers in fewer bits, and how often.

Numbers are integers with a scale for each row. A row is the last dimension: the channels of a head of a key
or a value, or one row of the state of linear attention.
"""

import torch
from torch import Tensor

SHORTEST = 32
"""Numbers of a row that are coded. A convolution keeps 3 or 4 of a channel, beside which a scale is much."""
_SCALES = ".scale"
_INTEGERS = {8: torch.int8, 16: torch.int16}
BITS = (*_INTEGERS, 32)
"""That are to be had; of 32, all numbers are as they are."""
EVERY = 8192
"""Tokens between two checkpoints, by default: one may take as much as thousands of tokens."""


def coded(held: dict[str, Tensor], bits: int) -> dict[str, Tensor]:
    """Tensors on the CPU, in at most so many ``bits`` a number where rows are long enough. Scales have the
    type that the numbers had.

    Raises:
        ValueError: NaN or infinity.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in held.items():
        own = tensor.detach().cpu()
        if not bool(own.isfinite().all()):
            raise ValueError(f"a layer that is not compressed holds NaN or infinity ('{name}')")
        if 8 * own.itemsize > bits and own.shape[-1] >= SHORTEST:
            most = torch.iinfo(_INTEGERS[bits]).max
            scale = (own.float().abs().amax(-1, keepdim=True) / most).to(own.dtype)
            whole = own.float() / scale.float().where(scale > 0, 1)
            found[name] = whole.round().clamp(-most, most).to(_INTEGERS[bits])
            found[name + _SCALES] = scale
        else:
            found[name] = own
    return {name: tensor.contiguous().clone() for name, tensor in found.items()}


def decoded(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that were `coded`.

    Raises:
        ValueError: they are not such.
    """
    held = {name: tensor for name, tensor in found.items() if not name.endswith(_SCALES)}
    for name in found.keys() - held.keys():
        whole, scale = held.get(name.removesuffix(_SCALES)), found[name]
        if whole is None or whole.dtype not in _INTEGERS.values() or not scale.is_floating_point():
            raise ValueError(f"'{name[:80]}' belongs to no integers")
        if scale.shape != (*whole.shape[:-1], 1):
            raise ValueError(f"'{name[:80]}' has more or fewer scales than there are rows")
        held[name.removesuffix(_SCALES)] = (whole.float() * scale.float()).to(scale.dtype)
    return held
