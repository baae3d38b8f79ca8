"""vLLM's own attention on a CPU, for chunks of a prompt."""

from torch import Tensor
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends import cpu_attn

from xquant.models import AttentionView
from xquant.past.exact import ExactAttention, Scoring, torch_attention
from xquant.serve.over_pages import SCRATCH, ChunkLayout, EngineAttention, OverPages


class CpuAttention(EngineAttention):
    """vLLM's own attention on a CPU."""

    def __init__(self, view: AttentionView) -> None:
        self._view = view
        self._isa = cpu_attn._get_attn_isa(view.dtype, SCRATCH, view.head_size)

    def plan(self, starts: Tensor, lengths: Tensor) -> Tensor:
        view = self._view
        heads = view.query_heads, view.kv_heads, view.head_size
        # A past is never split: what a token reads would be summed in another order beside other sequences.
        return ops.cpu_attn_get_scheduler_metadata(
            len(lengths), *heads, lengths, view.dtype, starts, True, -1, self._isa, False
        )

    def write(self, keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor) -> None:
        ops.cpu_attn_reshape_and_cache(keys, values, *cache.chunk(2, dim=2), slots, self._isa)

    def attend(
        self,
        query: Tensor,
        cache: Tensor,
        at: ChunkLayout,
        scoring: Scoring,
        out: Tensor,
    ) -> None:
        logits = None if scoring.sink_logits is None else scoring.sink_logits.float()
        sequences = at.starts, at.lengths, scoring.scaling, True, None, -1, at.table, scoring.softcap
        ops.cpu_attention_with_kv_cache(query, *cache.chunk(2, dim=2), out, *sequences, at.plan, logits)


def exact_of(view: AttentionView) -> ExactAttention:
    """vLLM's attention where it has one for such a layer, else torch's."""
    sizes = cpu_attn.CPUAttentionBackend.get_supported_head_sizes()
    if not current_platform.is_cpu() or view.head_size not in sizes:
        return torch_attention
    return OverPages(view, CpuAttention(view))
