"""What is not assumed of a model but checked, while a forward pass runs."""

import warnings

import torch
from torch import Tensor

from ..methods import LayerCodec, Seen
from ..models.base import is_plain, rotate
from ..models.rope import Pair
from ..store.tokens import TokenIndex

CHECKED_TOKENS = 8
"""Of the first forward pass of a sequence, whose states are compared."""
EXACT, ROUNDED = 1e-3, 5e-2
"""Relative errors that are allowed in fp32, and in other dtypes."""


def check_states(family: str, codec: LayerCodec, seen: Seen, index: TokenIndex) -> None:
    """Refuse a model whose keys and values are not what its adapter rebuilds.

    Raises:
        ValueError: they differ; the message names ``family``.
    """
    count = min(CHECKED_TOKENS, seen.x.shape[1])
    start = index.length - count
    newest = seen.last(count)
    states = codec.exact(codec.features(newest))
    view = codec.view
    key, value = (s.unflatten(-1, (view.kv_heads, view.head_size)) for s in states)
    if not codec.rotated:
        cos, sin = index.rope(key)
        key = rotate(key, cos[:, start:], sin[:, start:])
    for name, ours, theirs in (("keys", key, newest.key), ("values", value, newest.value)):
        theirs = theirs.transpose(1, 2).float()
        error = (ours.float() - theirs).norm() / theirs.norm().clamp_min(1e-6)
        # NaN compares false: it is reported as what it is by `finite`.
        exact = view.dtype == seen.raw_key.dtype == torch.float32  # autocast computes in another
        if error > (EXACT if exact else ROUNDED):
            cause = ""
            module = view.key_module if name == "keys" else view.value_module
            if not is_plain(module):
                cause = (
                    f"; the projection is a {type(module).__name__}: merge adapters, or call eval()"
                )
            raise ValueError(
                f"{family} is not supported: the {name} of layer {view.index} are not what its"
                f" projections and standard RoPE give (relative error {float(error):.2g}){cause}"
            )


def check_rope(family: str, rope: Pair, index: TokenIndex) -> None:
    """Refuse tokens that are turned by other angles than those of their positions.

    Args:
        rope: cos and sin that the model gives to a layer, ``[B, t, R]``.

    Raises:
        ValueError: they are, as those of images are; the message names ``family``.
    """
    cos = rope[0]
    own = index.rope_of_newest(cos, cos.shape[-2])
    # Some models give a table of another form; what they do with it is for `check_states`.
    if cos.dim() != 3 or cos.shape[-1] != own[0].shape[-1]:
        return
    close = EXACT if cos.dtype == torch.float32 else ROUNDED
    for given, ours in zip(rope, own, strict=True):
        if not torch.allclose(given.float(), ours.float(), atol=close):
            raise ValueError(
                f"{family}: these tokens are turned by other angles than those of their positions;"
                " positions of several axes, as of images (multimodal RoPE), need a method that keeps keys"
                " after RoPE, such as kivi-4bit:rope=post"
            )


def warn_of_another_text(seen: str, held: int) -> None:
    """Say what was ``seen`` of the input that does not go on with the ``held`` tokens of a cache."""
    warnings.warn(
        f"{seen}, but this cache holds {held} already: an earlier text is still in it; reset() it, or make"
        " a new one",
        stacklevel=2,
    )


def real_tokens(mask: Tensor | None, batch: int, length: int, device: torch.device) -> Tensor:
    """Which of the new tokens are not padding, from the last query's row of a 4D mask."""
    if mask is None or not isinstance(mask, Tensor) or mask.dim() != 4:
        return torch.ones(batch, length, dtype=torch.bool, device=device)
    seen = mask[:, 0, -1, -length:]
    if seen.dtype != torch.bool:
        seen = seen > torch.finfo(seen.dtype).min / 2
    return seen.expand(batch, length)
