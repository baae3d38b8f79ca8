"""Attention over the packed store, without keys and values in between.

``reference`` (plain torch: `CompressedLayer.read`, then the model's own attention) is the truth. The others
answer for a few queries at a time and agree with it; `dispatch.choose` says which is used, and why.
"""

KERNELS = ("auto", "triton", "avx512", "avx2", "folded", "reference")
"""Here, where the command line finds them without torch."""
