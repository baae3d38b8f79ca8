"""The structures of csrc/arguments.h, name by name."""

from collections.abc import Iterable
from ctypes import Structure, c_float, c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from ...models.rotation import Pair

MASKS = {torch.bool: 1, torch.float32: 2, torch.bfloat16: 3, torch.float16: 4}
"""Kinds of masks, by dtype."""


class Heads(Structure):
    _fields_ = [("data", c_void_p), ("batch", c_int64), ("head", c_int64), ("token", c_int64)]

    @classmethod
    def of(cls, states: Tensor) -> "Heads":
        """``[B, heads, t, D]``, the channels of a head beside each other."""
        batch, head, token, _ = states.stride()
        return cls(states.data_ptr(), batch, head, token)

    @classmethod
    def of_rows(cls, states: Tensor) -> "Heads":
        """``[T, heads, D]`` of all sequences of an engine, of which each has a run of rows."""
        token, head, _ = states.stride()
        return cls(states.data_ptr(), token, head, token)


class Exact(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("row", c_int64),
        ("token", c_int64),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("columns", c_void_p),
        ("runs", c_void_p),
        ("capacity", c_int),
        ("count", c_int),
    ]

    def point_to(self, rows: Tensor | None) -> None:
        """Keys beside values, ``[., t, 2 G D]``."""
        self.data = address(rows)
        if rows is not None:
            self.row, self.token, _ = rows.stride()

    def rotate(self, angles: Pair) -> None:
        """Keys are rotated by these when they are read."""
        self.cos, self.sin = map(address, angles)


class Arguments(Structure):
    _fields_ = [
        *((name, Heads) for name in ("query", "key", "value", "out")),
        ("tail", Exact),
        ("sinks", Exact),
        ("mask", c_void_p),
        *((f"mask_{axis}", c_int64) for axis in ("batch", "query", "token")),
        ("addresses", c_void_p),
        ("table", c_void_p),
        ("table_stride", c_int64),
        *((name, c_void_p) for name in ("begins", "lengths")),
        *((f"{what}_{part}", c_void_p) for what in ("start", "within") for part in ("cos", "sin")),
        *((name, c_void_p) for name in ("key_offset", "sink_logits")),
        *((name, c_void_p) for name in ("sums", "maxima", "arrived")),
        *((name, c_void_p) for name in ("limits", "newest")),
        *((name, c_int) for name in ("columns", "limit", "past")),
        *((name, c_int) for name in ("queries", "group_heads", "kv_heads")),
        *((name, c_int) for name in ("key_group", "value_group", "mask_kind")),
        *((name, c_float) for name in ("scaling", "softcap", "softcap_inverse")),
    ]

    def point_to(self, **tensors: Tensor | None) -> None:
        for name, tensor in tensors.items():
            setattr(self, name, address(tensor))

    def rotate_blocks(self, angles: Iterable[Tensor]) -> None:
        """cos and sin of the starts of blocks, then of the places within."""
        self.start_cos, self.start_sin, self.within_cos, self.within_sin = map(address, angles)

    def scale(self, scaling: float, softcap: float) -> None:
        """Of scores; softcap 0 for none."""
        self.scaling, self.softcap = scaling, softcap
        self.softcap_inverse = 1 / softcap if softcap else 0.0

    def count(self, **numbers: Any) -> None:
        for name, number in numbers.items():
            setattr(self, name, number)


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor begins; None, which is null, for none."""
    return None if tensor is None else tensor.data_ptr()
