"""Quantization as pure functions on tensors; nothing here knows about models or caches."""

from .quantizer import Affine, Packed, Plain, Quantizer, Segment
from .rotation import hadamard

__all__ = ["Affine", "Packed", "Plain", "Quantizer", "Segment", "hadamard"]
