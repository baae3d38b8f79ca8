"""The Triton kernels that decode ranked codes, in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton", minversion="3.5")

from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.test_sealing import not_torch
from support import triton_interpreter
from support.attention_cases import DEVICE
from support.caches import make_cache
from support.models import tiny
from xquant.kernels.triton import BACKEND, support
from xquant.quant.quantizer import dense
from xquant.quant.ranked import Ranked, allot
from xquant.quant.steps import steps_of

pytestmark = pytest.mark.cases(1)

triton_interpreter.mend()


def test_attention_is_refused_by_name() -> None:
    model = tiny("qwen2", head_dim=32, hidden_size=128)
    with pytest.raises(ValueError, match="decoded once and multiplied by torch"):
        make_cache(model, "tc-2bit:group=32", kernel="triton")


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    channels=st.integers(1, 70),
    tokens=st.sampled_from([7, 16, 48, 128]),
    bits=st.integers(0, 8),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_decoding_is_that_of_torch_and_touches_no_other_column(
    channels: int, tokens: int, bits: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    size = 10 ** (4 * torch.rand(channels, generator=generator) - 2)
    x = torch.randn(3, tokens, channels, generator=generator) * size
    counts = allot([size.square().sort(descending=True).values], bits * channels)[0]
    quantizer = Ranked(steps_of(size.square()).to(torch.int16), counts)
    packed = quantizer.encode(x, None)
    rows = torch.full((3, tokens, channels + 5), 7.0, dtype=dtype)
    expected = rows.clone()
    quantizer.decode(packed, expected[..., 3:-2])
    packed = {name: dense(packed, name).to(DEVICE) for name in packed}
    rows = rows.to(DEVICE)
    with not_torch(quantizer):
        BACKEND.packer.unpack(quantizer, packed, rows[..., 3:-2])
    if dtype == torch.bfloat16 and support.interpreted():  # the interpreter cuts off what it cannot hold
        torch.testing.assert_close(rows.cpu(), expected, rtol=2**-7, atol=0)
    else:
        assert torch.equal(rows.cpu(), expected)
