"""NVFP4: floats of 4 bits, with a float of 8 bits as the scale of every 16."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad as padded

from .affine import checked
from .codebook import nearest
from .pack import pack, packed_rows, unpack
from .quantizer import Field, Packed, Quantizer, dense

BITS, GROUP = 4, 16
E2M1 = (-6.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What a code stands for. Between 4 and 6 there is nothing, so that numbers near 5 lose most."""
E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0


@dataclass(frozen=True, eq=False)
class Float4(Quantizer):
    """``x ~ E2M1[code] * scale`` for every 16 channels of a token; the last may be of fewer.

    Args:
        tops: the levels that the largest magnitude of a group may become. The one with the least squared
            error is taken, the first of equals.
    """

    tops: tuple[float, ...] = (6.0,)

    def encode(self, x: Tensor, excluded: Tensor | None) -> Packed:
        x = checked(x)
        groups = padded(x, (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP)).float()
        codes, scale, error = _coded(groups, self.tops[0])
        for top in self.tops[1:]:
            other, its_scale, its_error = _coded(groups, top)
            better = its_error < error
            codes, error = other.where(better[..., None], codes), its_error.where(better, error)
            scale = its_scale.where(better, scale)
        return {"codes": pack(codes.flatten(-2)[..., : x.shape[-1]], BITS), "scale": scale}

    def decode(self, packed: Packed, out: Tensor) -> None:
        tokens, channels = out.shape[-2:]
        codes = unpack(dense(packed, "codes"), BITS, tokens).int()
        scale = dense(packed, "scale").view(E4M3).float().repeat_interleave(GROUP, -1)[..., :channels]
        out.copy_(torch.tensor(E2M1, device=out.device)[codes] * scale)

    def fields(self, tokens: int, channels: int) -> dict[str, Field]:
        return {
            "codes": Field((packed_rows(tokens, BITS), channels), torch.uint8, "codes"),
            "scale": Field((tokens, -(-channels // GROUP)), torch.uint8, "ranges"),
        }


def _coded(groups: Tensor, top: float) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of groups ``[..., 16]`` whose largest magnitude becomes ``top``, the bits of their scales, and
    the sums of their squared errors."""
    stored = (groups.abs().amax(-1) / top).clamp(max=E4M3_MAX).to(E4M3)
    scale, levels = stored.float()[..., None], torch.tensor(E2M1, device=groups.device)
    codes = nearest(groups / scale.where(scale > 0, 1), levels)
    error = (levels[codes.int()] * scale - groups).square().sum(-1)
    return codes, stored.view(torch.uint8), error
