"""Caches that lived through much, and whether another goes on as one of them does."""

from functools import cache as memoize
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from support.caches import calibration
from support.generation import remove
from support.models import left_padded, prompt, tiny
from xquant import KVCache

SOME = [
    "kivi-2bit:group=8,sink=2",
    "crosslayer:group=8,tail=0,merge=floor,gamma=0.7,km=2,vm=0,sink=2",
    "kvquant-2bit-5%:group=8,per=matrix,weighting=fisher",
    "xquant-2bit:group=8,form=gqa,outlier=true,tail=5",
    "xquant-cl-3bit:group=8,form=gqa",
    "tc-cl-1.5bit:group=16,sink=2",
]


@memoize
def model_of(family: str, dtype: torch.dtype = torch.float32) -> Any:
    with torch.inference_mode(False):
        return tiny(family).to(dtype)


def two_layers(family: str) -> Any:
    """A tiny model. Of gemma3's layers one has a sliding window, and of qwen3_5's one is linear attention."""
    other = {"gemma3": "sliding_attention", "qwen3_5": "linear_attention"}.get(family)
    kinds = {"layer_types": [other, "full_attention"]} if other else {}
    return tiny(family, num_hidden_layers=2, **kinds)


def loaded(cache: KVCache, file: Path, tokens: Tensor | None = None, pack: str | None = None) -> KVCache:
    """The cache by way of a file."""
    cache.save(file, tokens, pack)
    model = cache.attachment.view.model
    other = KVCache.load(model, file, calibration(model, cache.method))
    file.unlink()
    return other


def through_file(cache: KVCache) -> KVCache:
    """The same, by way of one that nobody else reads."""
    with TemporaryDirectory() as folder:
        return loaded(cache, Path(folder) / "cache")


class Run:
    """A cache and the mask of what it holds."""

    def __init__(self, model: Any, cache: KVCache, mask: Tensor) -> None:
        self.model, self.cache, self.mask = model, cache, mask[:, :0]
        self.wanted = mask

    @torch.inference_mode()
    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        new = torch.ones_like(ids) if mask is None else mask
        self.mask = torch.cat([self.mask, new], 1)
        given = {"attention_mask": self.mask, "past_key_values": self.cache, "use_cache": True}
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        logits: Tensor = self.model(ids, position_ids=positions, **given).logits
        return logits

    def go_on(self) -> Tensor:
        """Logits of decoding, of a longer input, and of decoding again; blocks are sealed on the way."""
        batch = len(self.mask)
        parts = [prompt(batch, count, seed=20 + count) for count in (1, 7, 1, 19, 1)]
        return torch.cat([self.forward(part) for part in parts], 1)

    def same_with(self, cache: KVCache) -> bool:
        """Whether another cache goes on in the same way, and holds the same afterwards."""
        other = Run(self.model, cache, self.mask)
        other.mask = self.mask
        assert cache.nbytes == self.cache.nbytes
        assert {**cache.report().to_dict()} == {**self.cache.report().to_dict()}
        mine, theirs = self.go_on(), other.go_on()
        return torch.equal(mine, theirs) and cache.nbytes == self.cache.nbytes


def lived(model: Any, cache: KVCache) -> Run:
    """Sequences that were padded, given in parts, cropped into a block, repeated and reordered."""
    batch = left_padded([41, 9, 20])
    run = Run(model, cache, batch["attention_mask"])
    for ids, mask in zip(*(batch[k].split(15, 1) for k in ("input_ids", "attention_mask")), strict=True):
        run.forward(ids, mask)
    if not any(getattr(layer, "is_sliding", False) for layer in cache.layers):
        remove(cache, 11)
        run.mask = run.mask[:, :-11]
    run.forward(prompt(3, 19, seed=3))
    cache.batch_repeat_interleave(2)
    order = torch.tensor([5, 0, 0, 3])
    cache.batch_select_indices(order)
    run.mask = run.mask.repeat_interleave(2, 0)[order]
    run.forward(prompt(4, 3, seed=4))
    return run
