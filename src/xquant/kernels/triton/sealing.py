"""Blocks packed by Triton in one launch: jit/seal.py. It equals `Affine.encode`, bit for bit."""

import torch
from torch import Tensor

from ...quant import Affine, Packed
from ...quant.pack import packed_rows
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
    lanes, summed = (tokens, head) if by_token else (head, tokens)
    group = quantizer.range_size(channels if per_token else tokens)
    ranges = (-(-channels // group), tokens) if per_token else (-(-tokens // group), channels)
    shape = blocks, channels // head, lanes // 16, packed_rows(summed // 4, bits), 64
    codes = torch.empty(shape, dtype=torch.uint8, device=x.device)
    scale = torch.empty(blocks, *ranges, dtype=torch.float16, device=x.device)
    zero, found_nan = torch.empty_like(scale), torch.zeros(1, dtype=torch.int32, device=x.device)
    hides = excluded is not None and not per_token
    seal[(blocks, channels // head)](
        x,
        excluded.contiguous() if excluded is not None and hides else found_nan,
        codes.view(torch.int32),
        scale,
        zero,
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
    return {"codes": codes, "scale": scale, "zero": zero}
