"""From the store of one cache to that of another: what the one reads, the other is given."""

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .methods import LayerCodec
from .models.rotation import rotate, unrotate
from .store.layer import CompressedLayer
from .store.tokens import TokenIndex

if TYPE_CHECKING:
    from .cache import KVCache


@torch.no_grad()
def fill(target: "KVCache", source: "KVCache") -> None:
    """Give the empty ``target`` all tokens of ``source``, a cache of the same model, which stays as it is.

    Layer by layer, bottom up: the states of one layer (and what it is predicted from) are there at a time.

    Raises:
        ValueError: ``target`` keeps more than keys and values tell.
    """
    for cache in (source, target):
        if any(layer.evicts for layer in cache.compressed):
            raise ValueError(f"a cache of {cache.method.spec} cannot be converted: it drops tokens")
    for layer in target.compressed:
        if not layer.codec.keeps_states:
            raise ValueError(
                f"a cache cannot be converted to {target.method.spec}: it stores layer inputs, which keys and"
                " values do not tell; run the model on the tokens instead"
            )
    for i, own in enumerate(source.layers):
        if not isinstance(own, CompressedLayer):
            target.layers[i] = copy.deepcopy(own)
    if source.index.length == 0:
        return
    target.index.take(source.index)
    try:
        for old, new in zip(source.compressed, target.compressed, strict=True):
            old.accumulate()
            key, value = old.held()
            new.append_rows(_rows(key, value, old.codec, new.codec, source.index))
            for below in (old.below, new.below):
                if below is not None:
                    below.release()
    finally:
        for cache in (source, target):
            cache.stack.forget_pass()


def _rows(
    key: Tensor, value: Tensor, old: LayerCodec, new: LayerCodec, index: TokenIndex
) -> Tensor:
    """What the codec ``new`` keeps of tokens whose states the codec ``old`` holds."""
    if old.rotated != new.rotated:
        heads = key.unflatten(-1, (old.view.kv_heads, old.view.head_size))
        turn = unrotate if old.rotated else rotate
        key = turn(heads, *index.rope(heads)).flatten(2)
    return torch.cat([key, value], -1)
