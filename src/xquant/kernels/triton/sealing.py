"""Blocks packed by Triton in one launch: jit/seal.py. It equals `Affine.encode`, bit for bit."""

import torch
from torch import Tensor

from ...quant import Affine, Packed
from .jit.seal import seal
from .support import power


def pack_affine(quantizer: Affine, x: Tensor, excluded: Tensor | None) -> Packed:
    """Blocks ``[N, n, C]`` whose codes lie in tiles; ``excluded`` is bool ``[N, n]``.

    Raises:
        ValueError: ``x`` holds NaN in a token that sets a range.
    """
    assert quantizer.tile is not None
    if x.stride(-1) != 1:
        x = x.contiguous()
    blocks, tokens, channels = x.shape
    head, bits = quantizer.tile.head, quantizer.bits
    by_token, per_token = quantizer.tile.lanes == "tokens", quantizer.per == "token"
    group = quantizer.range_size(channels if per_token else tokens)
    fields = quantizer.fields(tokens, channels)
    packed = {name: field.empty(blocks, x.device) for name, field in fields.items()}
    found_nan = torch.zeros(1, dtype=torch.int32, device=x.device)
    hides = excluded is not None and not per_token
    seal[(blocks, channels // head)](
        x,
        excluded.contiguous() if excluded is not None and hides else found_nan,
        packed["codes"].view(torch.int32),
        packed["scale"],
        packed["zero"],
        found_nan,
        *x.stride()[:2],
        channels,
        quantizer.eta * (2**bits - 1),
        1 - 2 * quantizer.eta,
        D=head,
        DP=power(head),
        N=tokens,
        NP=power(tokens),
        BITS=bits,
        PER_TOKEN=per_token,
        GROUP=group,
        BY_TOKEN=by_token,
        HIDDEN=hides,
        ETA=quantizer.eta != 0,
        num_warps=8,
        enable_fp_fusion=False,  # as torch computes
    )
    if bool(found_nan):
        raise ValueError("NaN cannot be quantized")
    return {**packed}
