"""From the store of one cache to that of another: what the one reads, the other is given."""

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..methods import LayerCodec
from ..models.rotation import apply_rope, remove_rope
from ..past.tokens import TokenIndex
from . import others
from .contents import Contents


@torch.no_grad()
def fill(target: Contents, source: Contents) -> None:
    """Give an empty cache, the ``target``, all tokens of ``source``, of the same model, which stays as it is.

    Raises:
        ValueError: ``target`` keeps more than keys and values tell.
    """
    _check(target)
    for number, layer in source.others.items():
        target.layers[number] = copy.deepcopy(layer)
    target.linear_states.update(copy.deepcopy(source.linear_states))
    if source.index.length:
        target.index.take(source.index)
        _pour(source, [target], lambda rows, _: rows)


@torch.no_grad()
def fill_apart(targets: Mapping[int, Contents], source: Contents, ids: Tensor) -> None:
    """Give each of the empty ``targets`` one sequence of ``source``, that of its number, without padding.

    Args:
        ids: of the tokens of ``source``, ``[B, T]``.

    Raises:
        ValueError: as of `fill`; padding among the tokens that a sliding window holds.
    """
    index, numbers = source.index, list(targets)
    for number, target in targets.items():
        _check(target)
        real = index.real[number]
        own = ids[number, real.to(ids.device)][None]
        target.index.give(index.positions[number, real][None], real[real][None], (), own)
        others.fill(target, others.Tensors(others.held_alone(source, number)), 1, target.index.length)

    def of_one(rows: Tensor, place: int) -> Tensor:
        number = numbers[place]
        return rows[number, index.real[number].to(rows.device)][None]

    _pour(source, list(targets.values()), of_one)


def _check(target: Contents) -> None:
    for layer in target.compressed:
        if not layer.codec.keeps_states:
            raise ValueError(
                f"a cache cannot be converted to {target.method.spec}: it stores layer inputs, which keys and"
                " values do not tell; run the model on the tokens instead"
            )


def _pour(source: Contents, targets: Sequence[Contents], part: Callable[[Tensor, int], Tensor]) -> None:
    """Layer by layer, bottom up: the states of one layer (and what it is predicted from) are there at a time.

    Args:
        part: of the features ``[B, T, W]`` of all tokens, those that the target of this place is given.
    """
    try:
        for at, old in enumerate(source.compressed):
            old.accumulate()
            key, value = old.held()
            for place, target in enumerate(targets):
                new = target.compressed[at]
                new.append_rows(part(_rows(key, value, old.codec, new.codec, source.index), place))
                new.release_below()
            old.release_below()
    finally:
        for each in (source, *targets):
            each.stack.forget_pass()


def _rows(key: Tensor, value: Tensor, old: LayerCodec, new: LayerCodec, index: TokenIndex) -> Tensor:
    """What the codec ``new`` keeps of tokens whose states the codec ``old`` holds."""
    if old.rotated != new.rotated:
        heads = key.unflatten(-1, (old.view.kv_heads, old.view.head_size))
        move = remove_rope if old.rotated else apply_rope
        key = move(heads, *index.rope(heads)).flatten(2)
    return torch.cat([key, value], -1)
