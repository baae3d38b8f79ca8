"""What is not assumed of a model but checked, while a forward pass runs."""

import warnings

import torch
from torch import Tensor

from ..methods import AttentionInputs, LayerCodec
from ..models.rotation import Pair, apply_rope
from ..models.weights import is_plain
from ..past.tokens import TokenIndex
from .masks import PassMask
from .passes import LayerInputs

CHECKED_TOKENS = 8
"""Of the first forward pass of a sequence, whose states are compared."""
EXACT, ROUNDED = 1e-3, 5e-2
"""Relative errors that are allowed in fp32, and in other dtypes."""


def check_input(batch: int, length: int, mask: PassMask, sequences: int, held: int) -> None:
    """Refuse an input that does not go on with the tokens of a cache.

    Args:
        length: new tokens of each of ``batch`` sequences.
        sequences: of the cache, 0 where it is empty, with ``held`` tokens each.

    Raises:
        ValueError: there is no new token, it is of another batch, or the mask is of other sizes.
    """
    if length == 0:
        raise ValueError(
            f"there is no new token: this cache holds {held} already, and goes on with the text that it"
            " holds; for another text reset() it, or make a new one"
        )
    tokens = mask.tokens
    if tokens is not None and tokens.shape[1] < held + length:
        warn_of_another_text(f"the attention mask covers {tokens.shape[1]} tokens, not {held + length}", held)
    if sequences not in (0, batch):
        raise ValueError(
            f"this cache holds a batch of {sequences}, the input has {batch}: use"
            " batch_repeat_interleave or batch_select_indices, or a new cache"
        )
    mask.check(batch, held, length)


def places(
    family: str, given: LayerInputs, of_pass: PassMask, index: TokenIndex
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The positions of the new tokens, and which of them are not padding, both ``[B, t]``; and positions
    ``[N, B, t]`` where they are of several axes that differ from those.

    Raises:
        ValueError: states that are no tokens; the message names ``family``.
    """
    (batch, length), device = given.x.shape[:2], given.x.device
    positions = given.positions
    if positions is None:
        positions = torch.arange(index.length, index.length + length, device=device)[None]
    mask = given.mask
    if isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[-1] < length:
        raise ValueError(f"{family} is not supported: its layers are given more states than tokens")
    known = of_pass.real(index.length, batch, length)
    every = torch.ones(batch, length, dtype=torch.bool, device=device)
    real = every if known is None else known.to(device)
    positions = positions.expand(batch, length)
    # Who is told apart by a mask of who sees whom may begin anew, as packed texts do.
    if length > 1 and index.length and (of_pass.is_plain or known is not None):
        lowest = int(torch.where(real, positions, index.length).min())
        if lowest < int(index.positions[:, -1].min()):
            warn_of_another_text(f"the new tokens begin at position {lowest}", index.length)
    axes = given.axes.expand(-1, batch, length) if given.axes is not None and index.takes_axes else None
    if axes is not None and index.axes is None and bool(((axes == positions) | ~real).all()):
        axes = None  # as of text
    return positions, real, axes


def check_not_recorded(states: Tensor) -> None:
    """Refuse to be a part of a CUDA graph: replayed, it would use the cache as it was when it was recorded.

    Raises:
        ValueError: a graph is being recorded on the device of ``states``.
    """
    if states.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "a compressed cache grows, and cannot be recorded in a CUDA graph: torch.compile (torch 2.8 or"
            " later) records what is between the attention of layers"
        )


def check_states(family: str, codec: LayerCodec, inputs: AttentionInputs, index: TokenIndex) -> None:
    """Refuse a model whose keys and values are not what its adapter rebuilds.

    Raises:
        ValueError: they differ; the message names ``family``.
    """
    count = min(CHECKED_TOKENS, inputs.x.shape[1])
    start = index.length - count
    newest = inputs.last(count)
    states = codec.exact(codec.features(newest))
    view = codec.view
    key, value = view.by_head(states)
    if not codec.rotated:
        cos, sin = index.rope(key)
        key = apply_rope(key, cos[:, start:], sin[:, start:])
    for name, ours, theirs in (("keys", key, newest.key), ("values", value, newest.value)):
        theirs = theirs.transpose(1, 2).float()
        error = (ours.float() - theirs).norm() / theirs.norm().clamp_min(1e-6)
        # NaN compares false: it is reported as what it is by `finite`.
        exact = view.dtype == inputs.raw_key.dtype == torch.float32  # autocast computes in another
        if error > (EXACT if exact else ROUNDED):
            cause = ""
            module = view.key_module if name == "keys" else view.value_module
            if not is_plain(module):
                cause = f"; the projection is a {type(module).__name__}: merge adapters, or call eval()"
            raise ValueError(
                f"{family} is not supported: the {name} of layer {view.index} are not what its"
                f" projections and standard RoPE give (relative error {float(error):.2g}){cause}"
            )


def check_rope(family: str, rope: Pair, index: TokenIndex) -> None:
    """Refuse tokens whose RoPE has other angles than those of their positions.

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


def warn_of_another_text(what: str, held: int) -> None:
    """Say ``what`` of the input does not go on with the ``held`` tokens of a cache."""
    warnings.warn(
        f"{what}, but this cache holds {held} already: an earlier text is still in it; reset() it, or make"
        " a new one",
        stacklevel=2,
    )
