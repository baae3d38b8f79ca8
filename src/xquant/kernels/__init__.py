"""Attention over the packed store, without keys and values in between: one folder a backend.

``torch/`` holds the reference, which is the truth, and attention a few blocks at a time; ``cpu/`` the native
library; ``cuda/`` and ``triton/`` the kernels for GPUs. `backend` says what a backend is, `choose` which one
serves a layer, and why. Backends do not know each other. They share the description of a packed operand
(`xquant.quant.operand`), the addresses of blocks (`addresses`), the angles of RoPE (`rope`), what one
attention call is given (`call`, `packed_call`), and how blocks are split among programs (`splits`).
"""

KERNELS = ("auto", "cuda", "triton", "avx512", "avx2", "neon", "folded", "reference")
"""Here, where the command line finds them without torch."""
