"""Marks: by what a recorded graph knows the memory that it was recorded for.

A CUDA graph repeats the addresses of one cache. So compiled steps are given a tensor that is marked as one
whose address stays: where that is another, inductor records again. Nobody reads it. An address that was freed
may come back, so that of a mark never is.
"""

import threading

import torch
from torch import Tensor

SIZE, COUNT = 64, 1024
"""Bytes of a mark, as far apart as inductor wants its inputs to lie; and how many are made at a time."""

_lock = threading.Lock()
_made: dict[torch.device, list[Tensor]] = {}
_kept: list[Tensor] = []


@torch.inference_mode(False)
def new_mark(device: torch.device) -> Tensor:
    """A tensor ``[1]`` on ``device`` at an address that no other has, for as long as the process runs."""
    with _lock:
        free = _made.setdefault(device, [])
        if not free:
            slab = torch.zeros(COUNT, SIZE, dtype=torch.uint8, device=device)
            _kept.append(slab)
            free += slab[:, :1].unbind()
        mark = free.pop()
    torch._dynamo.mark_static_address(mark)
    return mark
