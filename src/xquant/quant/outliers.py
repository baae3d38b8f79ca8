"""Outliers of a block: elements that are stored apart, as a residual to what their codes decode to."""

from collections.abc import Mapping

import torch
from torch import Tensor

from .affine import FP16_MAX
from .quantizer import Packed, dense
from .ragged import Ragged


def count_dtype(channels: int) -> torch.dtype:
    """Of a token's number of outliers; int16 is read as unsigned."""
    return torch.uint8 if channels < 256 else torch.int16


def pack_outliers(residual: Tensor, outliers: Tensor) -> Packed:
    """The fields of the outliers of blocks, token by token.

    A residual is stored rather than a value, so that a kernel adds it without looking at codes and ranges.

    Args:
        residual: ``[N, n, C]``: the elements minus what their codes decode to.
        outliers: bool ``[N, n, C]``.

    Returns:
        ``outlier_count`` ``[N, n]`` of each token; per block, one after the other, ``outlier_excess`` (the
        residuals in fp16) and ``outlier_channel`` (unsigned, kept in int16).
    """
    counts = outliers.sum(-1)
    channels = outliers.nonzero(as_tuple=True)[-1]
    values = residual[outliers].clamp(-FP16_MAX, FP16_MAX).half()
    per_block = counts.sum(-1)
    return {
        "outlier_count": counts.to(count_dtype(residual.shape[-1])),
        "outlier_excess": Ragged.split(values, per_block),
        "outlier_channel": Ragged.split(channels.to(torch.int16), per_block),
    }


RAGGED = {"outlier_excess": torch.float16, "outlier_channel": torch.int16}
"""The fields of which a block has one number for each outlier."""


def cut_outliers(counts: Tensor, flat: Mapping[str, Tensor], channels: int) -> dict[str, Ragged]:
    """The `RAGGED` fields of blocks of so many ``channels``, from all of their runs after each other.

    Args:
        counts: ``outlier_count`` ``[N, n]``.

    Raises:
        ValueError: there are more or fewer outliers than the counts say, or one of no channel.
    """
    long = counts.long()
    per_block = long.sum(-1)
    if bool((long < 0).any()) or bool((long > channels).any()):
        raise ValueError("a token has more outliers than channels")
    if any(tensor.shape != (int(per_block.sum()),) for tensor in flat.values()):
        raise ValueError("there are not as many outliers as are counted")
    if bool((flat["outlier_channel"].long() & 0xFFFF >= channels).any()):
        raise ValueError("an outlier is of no channel")
    return {name: Ragged.split(tensor, per_block) for name, tensor in flat.items()}


def into_room(packed: Packed, room: int) -> tuple[Packed, int]:
    """The same fields with `RAGGED` ones ``[N, room]``, and how many outliers found no place. Those that
    their codes miss by least are left out."""
    counts = dense(packed, "outlier_count").long()
    ragged = {name: list(_ragged(packed, name).blocks) for name in RAGGED}
    dropped = 0
    for block in (counts.sum(-1) > room).nonzero().flatten().tolist():
        excess = ragged["outlier_excess"][block]
        kept = excess.float().abs().topk(room).indices.sort().values
        tokens = torch.arange(counts.shape[1], device=counts.device).repeat_interleave(counts[block])
        counts[block] = tokens[kept].bincount(minlength=counts.shape[1])
        for each in ragged.values():
            each[block] = each[block][kept]
        dropped += len(excess) - room
    places = _places(counts, room)
    found: Packed = {**packed, "outlier_count": counts.to(dense(packed, "outlier_count").dtype)}
    for name, each in ragged.items():
        held = counts.new_zeros(len(counts), room, dtype=RAGGED[name])
        held[places] = torch.cat(each)
        found[name] = held
    return found, dropped


def from_room(packed: Packed) -> Packed:
    """The fields as they were before `into_room`."""
    counts = dense(packed, "outlier_count").long()
    held = {name: dense(packed, name) for name in RAGGED}
    places = _places(counts, held["outlier_excess"].shape[1])
    split = {n: Ragged.split(rows[places], counts.sum(-1)) for n, rows in held.items()}
    return {**packed, **split}


def _places(counts: Tensor, room: int) -> Tensor:
    """Which places of ``[N, room]`` hold an outlier."""
    return torch.arange(room, device=counts.device) < counts.sum(-1)[:, None]


def _ragged(packed: Packed, name: str) -> Ragged:
    found = packed[name]
    assert isinstance(found, Ragged)
    return found


def add_outliers(packed: Packed, out: Tensor) -> None:
    """Add the residuals of their outliers to blocks ``out`` ``[N, n, C]`` (fp32)."""
    values, channels = _ragged(packed, "outlier_excess"), _ragged(packed, "outlier_channel")
    counts = dense(packed, "outlier_count").flatten().long()
    rows = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    channel = channels.flat().long() & 0xFFFF
    tokens = out.shape[1]
    out[rows // tokens, rows % tokens, channel] += values.flat().float()
