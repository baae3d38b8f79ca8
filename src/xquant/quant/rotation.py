"""Orthogonal rotations that spread outlier channels over all channels before quantizing."""

import math

import torch
from torch import Tensor


def hadamard(size: int) -> Tensor:
    """A symmetric orthogonal matrix ``[size, size]`` (fp32) with entries of magnitude near ``size**-0.5``.

    The Sylvester-Hadamard matrix for the power of two in ``size``, times (Kronecker) the discrete
    Hartley matrix for its odd factor; a plain Hadamard matrix where ``size`` is a power of two.
    """
    power = size & -size
    odd = size // power
    steps = torch.arange(odd, device="cpu")
    angles = 2 * math.pi * torch.outer(steps, steps).double() / odd
    matrix = (angles.cos() + angles.sin()) / math.sqrt(odd)
    butterfly = matrix.new_tensor([[1.0, 1.0], [1.0, -1.0]]) / math.sqrt(2)
    for _ in range(power.bit_length() - 1):
        matrix = torch.kron(butterfly, matrix)
    return matrix.float()
