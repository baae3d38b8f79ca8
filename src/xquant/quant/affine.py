"""Asymmetric uniform quantization: ``x ~ code * scale + zero``, scale and zero in fp16.

What happens at the edges, on purpose:

* infinities, and values past fp16, saturate at +-65504; NaN raises. A group whose range is more than
  65504 times its ``2**b - 1`` steps (only at 1 bit) saturates at its zero point plus 65504;
* a constant group decodes to its value as fp16 holds it, or closer; a range that underflows fp16 gets
  scale 0 and decodes to its zero point;
* codes are computed with the *rounded* scale and zero, so rounding them costs no accuracy twice;
* tokens marked ``excluded`` (sinks, padding) do not widen the range of the group they fall in.
"""

import torch
from torch import Tensor

FP16_MAX = 65504.0


def quotient(x: Tensor, divisor: float) -> Tensor:
    """``x / divisor``, rounded alike on every device: torch on CUDA multiplies by ``1 / divisor`` where that
    is a number of Python, which may differ in the last bit."""
    return x / torch.full((), divisor, dtype=x.dtype, device=x.device)


def checked(x: Tensor) -> Tensor:
    """Elements in fp32, infinities saturated.

    Raises:
        ValueError: NaN.
    """
    x = x.float().clamp(-FP16_MAX, FP16_MAX)
    if torch.isnan(x).any():
        raise ValueError("NaN cannot be quantized")
    return x


def divisor(scale: Tensor) -> Tensor:
    """A scale in fp32, by which 0 divides to 0."""
    return scale.float().masked_fill(scale == 0, torch.inf)


def group_range(part: Tensor, dim: int, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Lowest and highest of one group along ``dim`` (kept as size 1).

    Elements that are ``hidden`` do not count; where all are, both are 0.

    Raises:
        ValueError: NaN in an element that counts.
    """
    low, high = part, part
    if hidden is not None:
        low, high = part.masked_fill(hidden, torch.inf), part.masked_fill(hidden, -torch.inf)
    low, high = low.amin(dim, keepdim=True), high.amax(dim, keepdim=True)
    if torch.isnan(low).any():
        raise ValueError("NaN cannot be quantized")
    empty = low > high
    return low.masked_fill(empty, 0), high.masked_fill(empty, 0)


def quantize(
    x: Tensor, bits: int, dim: int, group: int, excluded: Tensor | None = None, eta: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize ``x`` along ``dim`` in groups; the last group may be shorter.

    Args:
        x: ``[..., T, C]``, any float dtype.
        bits: 1 to 8.
        dim: ``-1`` for per-token groups of channels, ``-2`` for per-channel groups of tokens.
        group: elements per group.
        excluded: bool ``[..., T]``; tokens that are kept elsewhere and must not set a range.
        eta: draws both ends of the decoded range in by this share of it, 0 to 0.5 (arXiv 2510.11236,
            equation 9); codes do not depend on it.

    Returns:
        codes (uint8, the shape of ``x``), scale and zero (fp16; ``x``'s shape with ``dim`` replaced
        by the number of groups).

    Raises:
        ValueError: ``x`` holds NaN in a token that sets a range.
    """
    levels = 2**bits - 1
    x = x.float().clamp(-FP16_MAX, FP16_MAX)
    outside = None
    if excluded is not None and dim == -2:
        outside = excluded.unsqueeze(-1).expand_as(x)
    codes, scales, zeros = [], [], []
    for start in range(0, x.shape[dim], group):
        length = min(group, x.shape[dim] - start)
        part = x.narrow(dim, start, length)
        hidden = None
        if outside is not None:
            hidden = outside.narrow(dim, start, length)
            part = part.masked_fill(hidden, 0)
        low, high = group_range(part, dim, hidden)
        zero = low.half()
        height = (high - zero.float()).clamp_(min=0)
        scale = quotient(height, levels).clamp_(max=FP16_MAX).half()
        codes.append(((part - zero.float()) / divisor(scale)).round_().clamp_(0, levels).to(torch.uint8))
        if eta:
            zero = (zero.float() + eta * levels * scale.float()).half()
            scale = ((1 - 2 * eta) * scale.float()).half()
        scales.append(scale)
        zeros.append(zero)
    return torch.cat(codes, dim), torch.cat(scales, dim), torch.cat(zeros, dim)


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor, dim: int, group: int, out: Tensor) -> Tensor:
    """The inverse of :func:`quantize`, into ``out`` (the shape of ``codes``); computed in fp32.

    ``codes`` may be of any dtype: the levels of a codebook are scaled in the same way.
    """
    exact = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
    scale, zero = scale.float(), zero.float()
    for j, start in enumerate(range(0, codes.shape[dim], group)):
        length = min(group, codes.shape[dim] - start)
        torch.addcmul(
            zero.narrow(dim, j, 1),
            codes.narrow(dim, start, length).float(),
            scale.narrow(dim, j, 1),
            out=exact.narrow(dim, start, length),
        )
    if out.dtype == torch.float16:
        exact.clamp_(-FP16_MAX, FP16_MAX)  # the top code of a rounded-up scale may lie past it
    return out if exact is out else out.copy_(exact)
