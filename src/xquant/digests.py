"""Digests of the bits of tensors, about as fast as memory is read, and the same on every device."""

import hashlib
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

ROW = 24576
"""Words of 64 bits that are summed at once. They stay in a core's cache, and torch divides fewer than 32768
among no threads, which would cost more than it gives."""
_PART = 256
"""Rows that a device sums at once."""
_SAMPLED = 256
"""Numbers of a large tensor that `sample` reads."""
_SMALL = 1 << 15
"""Bytes up to which it reads all."""


def digest(tensor: Tensor) -> str:
    """SHA-256 over dtype, shape and a sum of 64 bits of every `ROW` words. In a sum each word is folded and
    multiplied by a number of its place, so words that change places, or signs that do, change it. This finds
    other weights; it is no signature.

    Raises:
        RuntimeError: the tensor does not hold its own bits.
    """
    words = _words(tensor)
    whole = len(words) // ROW * ROW
    rest = words[whole:]
    sums = [*_sums(words[:whole].view(-1, ROW)), *_sums(rest[None])]
    found = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
    found.update(torch.cat(sums).cpu().numpy().tobytes())
    return found.hexdigest()


def sample(tensor: Tensor) -> Tensor:
    """Some numbers of a tensor, evenly spaced; all of a small one."""
    flat = tensor.detach().reshape(-1)
    if tensor.nbytes > _SMALL:
        flat = flat[:: len(flat) // _SAMPLED]
    return _bytes(flat.contiguous())


def _sums(rows: Tensor) -> list[Tensor]:
    """A sum of each row ``[m, n]``."""
    factors = _factors(rows.device)[: rows.shape[1]]
    if rows.device.type == "cpu":
        return [_folded(row).dot(factors)[None] for row in rows]
    return [(_folded(part) * factors).sum(1) for part in rows.split(_PART)]


def _folded(words: Tensor) -> Tensor:
    """Without this, two words that differ in their highest bit alone would leave a sum as it is."""
    folded = words >> 32
    return folded.bitwise_xor_(words)


def _words(tensor: Tensor) -> Tensor:
    """The bits of a tensor, int64 ``[n]``, with zeros after them to a whole word."""
    held = _bytes(tensor.detach().contiguous())
    if held.storage_offset() % 8:
        held = held.clone()
    if short := -len(held) % 8:
        held = F.pad(held, (0, short))
    return held.view(torch.int64)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(torch.uint8)


@cache
@torch.inference_mode(False)
def _factors(device: torch.device) -> Tensor:
    """Odd numbers, always the same."""
    counted = hashlib.shake_256(b"xquant").digest(8 * ROW)
    return torch.frombuffer(bytearray(counted), dtype=torch.int64).to(device) | 1
