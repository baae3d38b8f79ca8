"""Bytes of whole quantized blocks, written out: what is stored must not change between versions."""

import pytest
import torch

from xquant.quant import Affine
from xquant.quant.quantizer import Granularity

# Four tokens of three channels, the last one constant.
BLOCK = torch.tensor([[[0.0, -1.0, 4.0], [1.0, 2.0, 4.0], [2.0, 0.5, 4.0], [3.0, 8.0, 4.0]]])

GOLDEN = [
    (2, "channel", "e4c400", "003c00420000", "000000bc0044"),
    (2, "token", "11c47f", "ab3e003cab3cab3e", "00bc003c00380042"),
    (3, "channel", "d8d8000c0800", "db36253d0000", "000000bc0044"),
    (4, "channel", "a02000f5f500", "6632cd380000", "000000bc0044"),
]


@pytest.mark.parametrize(("bits", "per", "codes", "scale", "zero"), GOLDEN)
def test_a_block_is_stored_as_these_bytes(
    bits: int, per: Granularity, codes: str, scale: str, zero: str
) -> None:
    packed = Affine(bits, per, 4).encode(BLOCK, None)
    held = {name: tensor.numpy().tobytes().hex() for name, tensor in packed.items()}
    assert held == {"codes": codes, "scale": scale, "zero": zero}
