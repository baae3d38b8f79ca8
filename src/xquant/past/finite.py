"""NaN and infinity are refused: codes are never made of them.

On a CPU rows are asked about before they are kept. Elsewhere the host would wait for the device at every
layer, so a decode step asks nothing: tails are asked about where the host waits anyway, before blocks are
sealed and after a prefill.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def asked_at_once(device: torch.device) -> bool:
    """Whether rows on ``device`` are asked about before they are kept."""
    return device.type == "cpu"


def check_rows(rows: Tensor, layer: int) -> None:
    """Refuse rows ``[B, t, W]`` of this forward pass.

    Raises:
        ValueError: they are not finite.
    """
    # What is not finite makes the sum so. One pass nearly always tells: a sum seldom grows too large.
    if math.isfinite(rows.sum(dtype=torch.float32)):
        return
    if not bool(torch.isfinite(rows).all()):
        raise _found(layer, "the cache was left as it was before this forward pass")


def check_tails(tails: Mapping[int, Tensor], length: int, before: int) -> None:
    """Refuse what is in the tails of layers; one question to the device for all of them.

    Args:
        tails: ``[B, t, W]`` by the layer's number.
        length: tokens that these layers hold.
        before: tokens that they held before this forward pass.

    Raises:
        ValueError: a tail is not finite. Where earlier forward passes left that, the message says from which
            token on, and what to do.
    """
    if not tails:
        return
    home = next(iter(tails.values())).device
    fine = [torch.isfinite(tail).all().to(home) for tail in tails.values()]
    if bool(torch.stack(fine).all()):
        return
    first, index = min((length - tail.shape[1] + _first(tail), index) for index, tail in tails.items())
    if first >= before:
        raise _found(index, "the cache was left as it was before this forward pass")
    crop = f"crop the cache to {first} tokens, or reset it" if first else "reset the cache"
    raise _found(index, f"an earlier forward pass left them there, from token {first} on; {crop}")


def _first(tail: Tensor) -> int:
    """The first token of a tail ``[B, t, W]`` that is not finite; ``t`` where all are."""
    bad = ~torch.isfinite(tail).all(-1).all(0)
    return int(bad.nonzero()[0]) if bool(bad.any()) else len(bad)


def _found(layer: int, what: str) -> ValueError:
    return ValueError(f"NaN or infinity in the hidden states of layer {layer}: {what}")
