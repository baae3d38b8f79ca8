"""Blocks of ranked codes decoded by Triton: jit/ranked.py. It equals `Ranked.decode`, bit for bit."""

from functools import cache
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...quant import Packed
from ...quant.operand import RankedOperand
from ...quant.quantizer import dense
from ...quant.ranked import Ranked, level_table, whole
from ...quant.steps import size_table
from ...quant.trellis import WIDTHS
from ..addresses import FIELDS
from .device import start
from .jit.ranked import decode, rank
from .support import power

RANKED = 64
"""Channels whose ranks a program finds."""

_own: WeakKeyDictionary[Ranked, dict[tuple[torch.device, int], tuple[Tensor, Tensor]]]
_own = WeakKeyDictionary()


def unpack_ranked(quantizer: Ranked, packed: Packed, out: Tensor) -> None:
    """Into ``out`` ``[N, n, C]``, contiguous in ``C``."""
    blocks, tokens, channels = out.shape
    device = out.device
    fields = {name: dense(packed, name).contiguous() for name in packed}
    addresses = _addresses(fields, blocks, device)
    usual, runs = _tables_of(quantizer, device, whole(tokens))
    levels, sizes = tables(device)
    order = torch.empty(blocks * channels, dtype=torch.int32, device=device)
    size = torch.empty(blocks * channels, dtype=torch.float32, device=device)
    grid = blocks, -(-channels // RANKED)
    ranked = order, size, addresses, usual, sizes, blocks, channels
    start(rank, grid, device, *ranked, RANKED=RANKED)
    start(
        decode,
        (blocks, len(WIDTHS) + 1),
        device,
        out,
        order,
        size,
        addresses,
        runs,
        levels,
        sizes,
        blocks,
        *out.stride()[:2],
        channels,
        tokens,
        N=whole(tokens),
        NP=power(whole(tokens)),
        enable_fp_fusion=False,  # as torch computes
    )


def _addresses(fields: dict[str, Tensor], blocks: int, device: torch.device) -> Tensor:
    """Of each field of every block, int64 ``[FIELDS, N]``; 0 of those that there are not."""
    found = torch.zeros(len(FIELDS), blocks, dtype=torch.int64, device="cpu")
    for name, held in fields.items():
        step = held.stride(0) * held.element_size()
        found[FIELDS.index(name)] = held.data_ptr() + torch.arange(blocks, device="cpu") * step
    return found.to(device)


def _tables_of(quantizer: Ranked, device: torch.device, tokens: int) -> tuple[Tensor, Tensor]:
    """The usual scales and the runs of a quantizer, on the device."""
    known = _own.setdefault(quantizer, {})
    if (device, tokens) not in known:
        operand = quantizer.operand(tokens, quantizer.channels)
        usual = quantizer.usual.to(device, torch.int32)
        known[device, tokens] = usual, run_table(operand, tokens).to(device)
    return known[device, tokens]


@cache
def tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """The levels of all widths, fp32 ``[widths, 2, 256]``, and sizes of whole steps, from that of 0 on."""
    sizes, zero = size_table()
    return level_table().to(device), sizes.to(device)[zero:]


def run_table(operand: RankedOperand, block: int) -> Tensor:
    """What `jit.ranked` calls ``runs``, int32 ``[widths, 3]``."""
    rows, first, start = [], 0, 0
    for width, count in zip(WIDTHS[::-1], operand.counts[::-1], strict=True):
        rows.append((first, count, start))
        first, start = first + count, start + count * width.nbytes(block)
    return torch.tensor(rows, dtype=torch.int32, device="cpu")
