"""Decoding with Triton's kernels captured as a CUDA graph: the same as launched one by one. Needs a GPU."""

import pytest
import torch

pytest.importorskip("triton", minversion="3.5")

from support.attention_cases import DEVICE, Case, filled
from xquant.kernels.call import AttentionCall
from xquant_lab.bench.clocks import capture

pytestmark = pytest.mark.skipif(DEVICE.type != "cuda", reason="XQUANT_TEST_DEVICE is not cuda")


@pytest.mark.parametrize("spec", ["kivi-4bit:group=32,sink=2", "int4:group=32", "kvquant-3bit-1%:group=32"])
def test_a_graph_attends_as_its_kernels_do(spec: str) -> None:
    case = Case(spec, path="triton", batch=2, tokens=200, dtype=torch.bfloat16)
    cache = filled(case)
    key, value = torch.randn(2, 2, case.kv_heads, 1, case.head_size, device=DEVICE).bfloat16()
    query = torch.randn(2, case.kv_heads * 2, 1, case.head_size, device=DEVICE).bfloat16()
    newest = AttentionCall(query, key, value, None, case.head_size**-0.5, None)
    found: list[torch.Tensor] = []

    def attend() -> None:
        found.clear()
        for layer in cache.compressed:
            out = cache.attend(layer.codec.view.index, newest)
            assert out is not None
            found.append(out)
        cache.finish()

    attend()
    launched = [out.clone() for out in found]
    graph = capture(attend, DEVICE)
    for _ in range(2):
        for out in found:
            out.zero_()
        torch.empty(1 << 22, device=DEVICE).normal_()  # where freed memory may be
        graph.replay()
        torch.cuda.synchronize()
        for ours, theirs in zip(found, launched, strict=True):
            assert torch.equal(ours, theirs)
