"""Blocks packed by Triton: jit/seal.py. It equals `Affine.encode` and `Codebook.encode`, bit for bit.

Affine codes take one launch. Of a codebook torch finds ranges and outliers, and the kernel the codes.
"""

import torch
from torch import Tensor

from ...quant import Affine, Codebook, Packed
from ...quant.levels import edges_of
from .device import start
from .jit.seal import assign, seal
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
    hidden = found_nan
    if not per_token:
        # Read where it hides nothing, too: a kernel that does not read it would be another.
        hidden = x.new_zeros(blocks, tokens, dtype=torch.bool) if excluded is None else excluded
    start(
        seal,
        (blocks, channels // head),
        x.device,
        x,
        hidden.contiguous(),
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
        HIDDEN=not per_token,
        ETA=quantizer.eta != 0,
        num_warps=8,
        enable_fp_fusion=False,  # as torch computes
    )
    if bool(found_nan):
        raise ValueError("NaN cannot be quantized")
    return {**packed}


def pack_codebook(quantizer: Codebook, x: Tensor, excluded: Tensor | None) -> Packed:
    """The same of non-uniform codes.

    Raises:
        ValueError: as of `pack_affine`.
    """
    assert quantizer.tile is not None
    scaled = quantizer.scaled(x, excluded)
    blocks, tokens, channels = x.shape
    head, bits = quantizer.tile.head, quantizer.bits
    in_bits = quantizer.fields(tokens, channels)["codes"].empty(blocks, x.device)
    # Outliers are stored as what their codes leave.
    plain = torch.empty(x.shape if quantizer.sparse else 1, dtype=torch.uint8, device=x.device)
    start(
        assign,
        (blocks, channels // head),
        x.device,
        scaled.x.contiguous(),
        edges_of(quantizer.levels.to(x.device).float()),
        in_bits.view(torch.int32),
        plain,
        channels,
        D=head,
        DP=power(head),
        N=tokens,
        NP=power(tokens),
        BITS=bits,
        BY_TOKEN=quantizer.tile.lanes == "tokens",
        PLAIN=quantizer.sparse,
        num_warps=8,
    )
    return quantizer.assembled(x, scaled, plain, in_bits)
