"""Caches filled with random states, and the error of a kernel's attention over them."""

import os
import warnings
from dataclasses import dataclass
from itertools import pairwise
from math import isnan
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from support.caches import calibration, make_cache
from support.models import left_padded, prompt, tiny
from xquant import KVCache
from xquant.kernels.call import AttentionCall
from xquant.methods import AttentionInputs

TOLERANCE = 1e-3
NARROW_TOLERANCE = 0.1
"""Where columns with codes of 3 bits and fewer are multiplied in 8 bits: keys miss by .4% of their narrow
columns, a softmax of few tokens and large scores by ten times that. A wrong column misses by half."""


TOLERANCES = {torch.float32: TOLERANCE, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""By dtype of the query."""
STRIDES = ("whole", "transposed", "offset", "wide", "expanded")


def tolerance_of(spec: str) -> float:
    return NARROW_TOLERANCE if spec.startswith("tc-") else TOLERANCE


DEVICE = torch.device(os.environ.get("XQUANT_TEST_DEVICE", "cpu"))
"""Where caches are: the CPU but for Triton's kernels, where a GPU is asked for (see conftest.py)."""


def flash_reads_groups() -> bool:
    """Whether torch's flash attention for CPUs takes fewer heads of keys than of queries."""
    states = (torch.zeros(1, heads, 1, 32) for heads in (2, 1, 1))
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            F.scaled_dot_product_attention(*states, enable_gqa=True)
    except RuntimeError:
        return False
    return True


needs_flash = pytest.mark.skipif(not flash_reads_groups(), reason="flash attention of this torch")


def laid(x: Tensor, layout: str) -> Tensor:
    """The same numbers in other memory; ``expanded``: the first of the last but one dimension, many times."""
    if layout == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "offset":
        return torch.cat([x.new_full((*x.shape[:-1], 3), torch.nan), x], -1)[..., 3:]
    if layout == "wide":  # channels with gaps between them
        return torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]
    if layout == "expanded":
        return x[..., :1, :].expand_as(x)
    return x.contiguous()


@dataclass
class Case:
    spec: str
    head_size: int = 32
    kv_heads: int = 2
    group_heads: int = 2
    batch: int = 1
    queries: int = 1
    tokens: int = 150
    path: str = "folded"
    dtype: torch.dtype = torch.float32
    softcap: float | None = None
    mask: str = "none"
    seed: int = 0
    layers: int = 4
    sink_logits: float | None = None
    """Of the learned scores of query heads, which have no values, the one in the middle."""
    turned: float = 1.0
    """The part of a head that RoPE turns."""
    query_size: float = 1.0
    """Near 0, all tokens have the same weight."""


def filled(case: Case) -> KVCache:
    """A cache with random states, appended in uneven pieces."""
    heads = case.kv_heads * case.group_heads
    model = tiny(
        "llama" if case.turned == 1 else "phi3",
        num_hidden_layers=case.layers,
        num_attention_heads=heads,
        num_key_value_heads=case.kv_heads,
        head_dim=case.head_size,
        hidden_size=8 * heads,
        **({} if case.turned == 1 else {"partial_rotary_factor": case.turned}),
    ).to(case.dtype)
    made = calibration(model, case.spec)
    cache = KVCache(model.to(DEVICE), case.spec, calibration=made, kernel=case.path)
    generator = torch.Generator().manual_seed(case.seed)
    real = torch.ones(case.batch, case.tokens, dtype=torch.bool)
    if case.mask != "none":
        padding = torch.randint(0, case.tokens // 2, (case.batch, 1), generator=generator)
        real = torch.arange(case.tokens) >= padding
    cuts = [0, case.tokens // 3, case.tokens - case.queries, case.tokens]
    for start, stop in pairwise(cuts):
        append(case, cache, real[:, start:stop], generator)
    return cache


def append(case: Case, cache: KVCache, real: Tensor, generator: torch.Generator) -> None:
    """Tokens with random states; ``real`` bool ``[B, t]``, False for padding."""
    batch, count = real.shape
    before = cache.index.real.sum(1, keepdim=True) if cache.index.length else 0
    real = real.to(DEVICE)
    cache.index.append((before + real.cumsum(1) - 1).clamp(min=0), real)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, case.dtype)

    for layer in cache.compressed:
        key = random(batch, case.kv_heads, count, case.head_size)
        # Some channels are much larger than others, and off centre, as keys are.
        wide, middle = (torch.linspace(*ends, case.head_size, device=DEVICE) for ends in ((0.3, 2), (-1, 1)))
        key = (key * wide + middle).to(case.dtype)
        value = random(batch, case.kv_heads, count, case.head_size)
        x = random(batch, count, 8 * case.kv_heads * case.group_heads)
        layer.append(AttentionInputs(x, x, key.transpose(1, 2).flatten(2), key, value))


def mask_for(case: Case, cache: KVCache) -> Tensor | None:
    if case.mask == "none":
        return None
    tokens, queries = cache.index.length, case.queries
    causal = torch.ones(queries, tokens, dtype=torch.bool, device=DEVICE).tril(tokens - queries)
    seen = cache.index.real[:, None, None] & causal
    if case.mask == "bool":
        return seen
    return torch.zeros_like(seen, dtype=case.dtype).masked_fill(~seen, torch.finfo(case.dtype).min)


def exact(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    softcap: float | None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Attention in fp64: ``[B, t, H, D]``."""
    repeats, queries, tokens = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
    key, value = (t.double().repeat_interleave(repeats, 1) for t in (key, value))
    scores = query.double() @ key.mT * query.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = torch.ones(queries, tokens, dtype=torch.bool, device=query.device)
        mask = mask.tril(tokens - queries)
    if mask.dtype != torch.bool:
        mask = mask == 0
    scores = scores.masked_fill(~mask, -torch.inf)
    if sink_logits is not None:
        learned = sink_logits.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, learned], -1)
        return (scores.softmax(-1)[..., :-1] @ value).transpose(1, 2)
    return (scores.softmax(-1).nan_to_num(0) @ value).transpose(1, 2)


def error(case: Case, cache: KVCache) -> float:
    """The largest relative error of a layer's attention; NaN where one has NaN."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    shape = (case.batch, case.kv_heads * case.group_heads, case.queries, case.head_size)
    wide = torch.randn((*shape[:3], case.head_size + 3), generator=generator)
    wide = wide.to(DEVICE, case.dtype)
    query = case.query_size * wide[..., 3:]  # neither contiguous nor aligned
    new = torch.randn(2, case.batch, case.queries, case.kv_heads, case.head_size, generator=generator)
    key, value = new.to(DEVICE, case.dtype).transpose(2, 3)
    mask, worst = mask_for(case, cache), 0.0
    learned = None
    if case.sink_logits is not None:
        learned = torch.linspace(-3, 3, query.shape[1], device=DEVICE) + case.sink_logits
    scaling = case.head_size**-0.5
    for layer in cache.compressed:
        index = layer.codec.view.index
        newest = AttentionCall(query, key, value, mask, scaling, case.softcap, learned)
        found = cache.attend(index, newest)
        assert found is not None and found.dtype == case.dtype
        keys, values, seen = cache.answer(index, key, value, mask)
        want = exact(query, keys, values, seen, case.softcap, learned)
        relative = float((found.double() - want).norm() / want.norm())
        worst = max(worst, relative, key=lambda each: (isnan(each), each))
    cache.finish()
    return worst


def decoding_error(model: Any, spec: str, kernel: str, lengths: list[int], steps: int) -> float:
    """Of the logits after ``steps`` tokens behind padded prompts, against the reference: relative, 2-norm."""
    model, logits = model.to(DEVICE), []
    batch = {name: given.to(DEVICE) for name, given in left_padded(lengths).items()}
    for name in ("reference", kernel):
        cache = make_cache(model, spec, kernel=name)
        with torch.inference_mode():
            ids, mask = batch["input_ids"], batch["attention_mask"]
            model(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
            for step in range(steps):
                mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
                ids = prompt(len(lengths), 1, seed=step).to(DEVICE)
                out = model(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
        assert name == "auto" or name in cache.report().kernel
        logits.append(out.logits)
    return float((logits[0] - logits[1]).norm() / logits[0].norm())
