"""Whether codecs that were computed from a model's weights are those that a cache was packed with.

An SVD may give a vector or its negative, as the library that computes it likes. Latents of one basis read
in the other would be nonsense, and no shape would tell.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..methods import LayerCodec, Method

CLOSE = 1e-3
"""How near two numbers of `probe` are where the bases are the same up to rounding."""


@torch.no_grad()
def probe(method: Method, codecs: Sequence[LayerCodec]) -> list[list[float]]:
    """For each codec, a number for each tensor that it computed from the weights; other bases give others."""
    if not method.built_from_weights or method.needs_calibration:
        return [[] for _ in codecs]  # a calibration has a digest
    return [
        [_number(held) for _, held in sorted(vars(codec).items()) if isinstance(held, Tensor)]
        for codec in codecs
    ]


def same(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> bool:
    """Whether two results of `probe` are of the same bases."""
    return [len(numbers) for numbers in ours] == [len(numbers) for numbers in theirs] and all(
        abs(a - b) <= CLOSE
        for mine, other in zip(ours, theirs, strict=True)
        for a, b in zip(mine, other, strict=True)
    )


def _number(tensor: Tensor) -> float:
    """What a matrix (or a vector) makes of two waves, over its size."""
    matrix = tensor.float().reshape(len(tensor), -1)
    rows, columns = (torch.arange(n, device=matrix.device).float().cos() for n in matrix.shape)
    return float(rows @ (matrix @ columns) / matrix.norm().clamp_min(1e-30))
