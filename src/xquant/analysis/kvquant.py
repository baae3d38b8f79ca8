"""KVQuant's tables of memory (arXiv 2401.18079, Appendix A), counted from this package's own store."""

from typing import Any

import torch

from ..spec import parse_method
from .memory import CacheLayout
from .shapes import Skeleton, shape_config

GIB = 2**30
"""The tables' GB."""
CONTEXTS = {"32K": 2**15, "128K": 2**17, "1M": 2**20, "10M": 10**7}
"""The tables' lengths: only 10M is a round number of thousands."""
TABLE_8 = ("full", *(f"kvquant-{bits}bit{share}" for bits in (4, 3, 2) for share in ("", "-1%")))

Rows = list[dict[str, Any]]


def table7(shape: str) -> Rows:
    """Sizes of the weights and of the cache by batch and context: in fp16, and at 2 bits for 10M tokens.

    ``weights_gib`` and ``cache_gib`` of a row are in GiB; weights at 2 bits are an eighth of fp16.

    Raises:
        ValueError: no such shape.
    """
    skeleton = Skeleton(shape_config(shape), torch.float16)
    asked = [("full", length) for length in CONTEXTS] + [("kvquant-2bit", "10M")]
    rows = [_row(skeleton, method, length, batch) for batch in (1, 4) for method, length in asked]
    for row in rows:
        row["weights_gib"] = skeleton.nbytes / GIB / (1 if row["method"] == "full" else 8)
    return rows


def table8(shape: str) -> Rows:
    """``cache_gib`` of one sequence by method and context.

    Raises:
        ValueError: no such shape.
    """
    skeleton = Skeleton(shape_config(shape), torch.float16)
    lengths = [length for length in CONTEXTS if length != "32K"]
    return [_row(skeleton, method, length, 1) for method in TABLE_8 for length in lengths]


def _row(skeleton: Skeleton, method: str, length: str, batch: int) -> dict[str, Any]:
    held = CacheLayout(skeleton, parse_method(method)).count(CONTEXTS[length], batch)
    size = held.total / GIB
    return {"method": method, "length": length, "batch": batch, "cache_gib": size}
