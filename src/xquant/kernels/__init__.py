"""Attention over the packed store, without keys and values in between.

``reference`` (plain torch: `CompressedLayer.read`, then the model's own attention) is the truth. The others
answer for a few queries at a time and agree with it; `choose` says which is used, and why.
"""

from .dispatch import KERNELS, Choice, choose

__all__ = ["KERNELS", "Choice", "choose"]
