"""Blocks of ranked codes decoded by Triton: jit/ranked.py. It equals `Ranked.decode`, bit for bit."""

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...quant import Packed
from ...quant.quantizer import dense
from ...quant.ranked import Ranked, whole
from ...quant.trellis import WIDTHS
from .arguments import Blocks
from .block_table import FIELDS
from .jit.ranked import decode, rank
from .ranked import RANKED, run_table, tables
from .support import power

_own: WeakKeyDictionary[Ranked, dict[tuple[torch.device, int], tuple[Tensor, Tensor]]]
_own = WeakKeyDictionary()


def unpack_ranked(quantizer: Ranked, packed: Packed, out: Tensor) -> None:
    """Into ``out`` ``[N, n, C]``, contiguous in ``C``."""
    blocks, tokens, channels = out.shape
    device = out.device
    fields = {name: dense(packed, name).contiguous() for name in packed}
    held, number = _addresses(fields, blocks, device), torch.zeros(1, dtype=torch.int32)
    usual, runs = _tables_of(quantizer, device, whole(tokens))
    levels, sizes = tables(device)
    order = torch.empty(blocks * channels, dtype=torch.int32, device=device)
    size = torch.empty(blocks * channels, dtype=torch.float32, device=device)
    at = Blocks(held, number.to(device), number.to(device))
    rank[(blocks, -(-channels // RANKED), 1)](
        order, size, at, usual, sizes, blocks, channels, RANKED=RANKED
    )
    decode[(blocks, len(WIDTHS) + 1)](
        out,
        order,
        size,
        at,
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
    found = torch.zeros(len(FIELDS), blocks, dtype=torch.int64)
    for name, held in fields.items():
        step = held.stride(0) * held.element_size()
        found[FIELDS.index(name)] = held.data_ptr() + torch.arange(blocks) * step
    return found.to(device)


def _tables_of(quantizer: Ranked, device: torch.device, tokens: int) -> tuple[Tensor, Tensor]:
    """The usual scales and the runs of a quantizer, on the device."""
    known = _own.setdefault(quantizer, {})
    if (device, tokens) not in known:
        operand = quantizer.operand(tokens, quantizer.channels)
        usual = quantizer.usual.to(device, torch.int32)
        known[device, tokens] = usual, run_table(operand, tokens).to(device)
    return known[device, tokens]
