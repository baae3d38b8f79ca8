"""An engine's own attention over chunks, here one in torch that goes through the pages as an engine would."""

from typing import Any

import torch
from torch import Tensor

from support.models import tiny
from support.paged_sequences import step_of
from xquant.models import view_model
from xquant.past.exact import Scoring, torch_attention
from xquant.past.step import NewTokens, Retention
from xquant.serve.over_pages import SCRATCH, ChunkLayout, EngineAttention, OverPages


class TorchEngine(EngineAttention):
    def __init__(self) -> None:
        self.plans = 0

    def plan(self, starts: Tensor, lengths: Tensor) -> Any:
        self.plans += 1
        return len(lengths)

    def write(self, keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor) -> None:
        for states, half in ((keys, 0), (values, SCRATCH)):
            cache[slots // SCRATCH, :, slots % SCRATCH + half] = states

    def attend(
        self,
        query: Tensor,
        cache: Tensor,
        at: ChunkLayout,
        scoring: Scoring,
        out: Tensor,
    ) -> None:
        assert at.plan == len(at.lengths)
        for number, length in enumerate(at.lengths.tolist()):
            pages = cache[at.table[number].long()]  # [c, G, 2 * SCRATCH, D]
            keys, values = (half.transpose(1, 2).flatten(0, 1)[:length] for half in pages.chunk(2, 2))
            own = slice(*at.starts[number : number + 2].tolist())
            groups = query.shape[1] // keys.shape[1]
            keys, values = (t.repeat_interleave(groups, 1) for t in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", query[own], keys) * scoring.scaling
            later = torch.ones(scores.shape[1:]).triu(length - (own.stop - own.start) + 1).bool()
            weights = scores.masked_fill(later, -torch.inf).softmax(-1)
            out[own] = torch.einsum("hqk,khd->qhd", weights, values)


def test_chunks_of_any_length_are_laid_out() -> None:
    torch.manual_seed(0)
    view = view_model(tiny("llama")).compressed[0]
    heads, size = view.kv_heads, view.head_size
    engine = TorchEngine()
    attention = OverPages(view, engine)
    new_tokens = [
        NewTokens(0, 40, 0),
        NewTokens(40, 41, 300),
        NewTokens(41, 170, 128),
        NewTokens(170, 172, 127),
    ]
    tables = torch.arange(16).view(4, 4)
    step = step_of(new_tokens, [0, 1, 2, 3], tables, Retention(SCRATCH, SCRATCH))
    _, chunks = step.readers(native=False)
    query = torch.randn(172, view.query_heads, size)
    for _ in range(2):  # layers take the same memory, and the same plan
        states: list[tuple[Tensor, Tensor]] = []
        for tokens in new_tokens:
            keys, values = torch.randn(2, tokens.after, heads, size)
            states.append((keys, values))
        found = attention(query, states, chunks, Scoring(0.2))
        assert (found - torch_attention(query, states, chunks, Scoring(0.2))).abs().max() < 1e-5
    assert engine.plans == 1
