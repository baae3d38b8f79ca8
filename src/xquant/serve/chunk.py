"""ChunkCoder: chunks of tokens of all layers as bytes of one size, for stores that keep each as one object.

Letters: ``L`` layers; ``T`` tokens of a chunk, in ``m`` blocks of ``n``; ``W = 2 G D``, a rotated key beside
a value; ``S`` sinks of the method.
"""

import hashlib
import json
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.choose import packer_of
from ..past.tokens import look_up
from .build import Model, calibration_for
from .coding import LayerCoder
from .fit import Wanted, codecs_for

_MAGIC = b"XQC1"
_HEAD = struct.Struct("<4s32sq32s")
"""The kind of file, the identity of what may read it, the position that it begins at, and a SHA-256 of the
rest."""
_FORMAT = 1
ANYWHERE = -1
"""The position of a chunk whose bytes do not depend on it."""


class ChunkCoder:
    """Packs chunks by a method, and reads them.

    Args:
        model: as an engine knows it, with its checkpoint at hand where the method asks for it.
        wanted: the method, and its calibration.
        tokens: ``T``.

    Raises:
        ValueError: the method cannot be served for the model, which may have states beside attention, or
            chunks are no whole blocks.
    """

    def __init__(self, model: Model, wanted: Wanted, tokens: int) -> None:
        method = wanted.method
        if tokens < 1 or tokens % method.group:
            raise ValueError(
                f"xquant: chunks of {tokens} tokens are no whole blocks of {method.spec}, which have"
                f" {method.group}"
            )
        if model.has_states:
            raise ValueError("xquant: chunks have no states, such as Mamba's: the model's are not stored")
        codecs = codecs_for(wanted, model, None, 0, stored=True)
        before = any(not codec.rotated for codec in codecs)
        angles = model.angles() if before else None
        packer = packer_of(wanted.kernel, torch.device("cpu"))
        self._layers = [
            LayerCoder(codec, method, None if codec.rotated else angles, packer) for codec in codecs
        ]
        self.view, self._embedding = codecs[0].view, codecs[0].embedding
        self.tokens, self.dtype, self._block = tokens, model.dtype, method.group
        self._longest = model.longest
        self.shape = len(codecs), tokens, 2 * codecs[0].view.kv_width
        """``[L, T, W]``"""
        self._sinks = len(codecs), method.sink, self.shape[2]
        self.needs_ids = self._embedding is not None
        self.needs_positions = before or bool(method.sink) or self.needs_ids
        """Whether a chunk cannot be packed where it is not known which tokens it has."""
        made = calibration_for(method, model, wanted.calibration)
        digest = "" if made is None else made.digest
        parts = [_FORMAT, model.identity, str(model.dtype), method.spec, digest, tokens]
        self._identity = hashlib.sha256(json.dumps(parts).encode()).digest()

    @property
    def nbytes(self) -> int:
        """Of every chunk."""
        blocks = self.tokens // self._block
        packed = blocks * sum(layer.layout.packed_nbytes for layer in self._layers)
        return _HEAD.size + packed + self._sink_nbytes + (4 * self.tokens if self.needs_ids else 0)

    @property
    def _sink_nbytes(self) -> int:
        layers, sinks, width = self._sinks
        return layers * sinks * width * self.dtype.itemsize

    def encode(self, rows: Tensor, start: int | None = None, ids: Sequence[int] | None = None) -> Tensor:
        """The bytes ``[nbytes]`` of a chunk.

        Args:
            rows: ``[L, T, W]``.
            start: the position of its first token, where it is known.
            ids: of its tokens; they are stored where the method needs them.

        Raises:
            ValueError: states of another shape or dtype, NaN, or a position or ids that must be known.
        """
        if rows.shape != self.shape or rows.dtype != self.dtype:
            given = f"{rows.dtype} {list(rows.shape)}"
            raise ValueError(f"xquant: a chunk is {self.dtype} {list(self.shape)} here, not {given}")
        first = self._first(start, ids)
        known = torch.tensor(
            [] if ids is None or not self.needs_ids else [*ids], dtype=torch.int32, device="cpu"
        )
        starts, embedded = self._starts(first), self._embedded(known)
        packed, below = [], None
        for layer, own in zip(self._layers, rows.unflatten(1, (-1, self._block)), strict=True):
            held, below = layer.pack(own, starts, below, embedded)
            packed.append(held)
        sinks = rows.new_zeros(self._sinks)
        if first == 0:
            sinks = rows[:, : self._sinks[1]].contiguous()
        parts = torch.cat(packed, 1), sinks, known
        body = torch.cat([part.flatten().view(torch.uint8) for part in parts])
        head = _HEAD.pack(_MAGIC, self._identity, first, _checksum(body))
        return torch.cat([torch.frombuffer(bytearray(head), dtype=torch.uint8), body])

    def decode(self, held: Tensor, start: int | None = None) -> Tensor:
        """The states ``[L, T, W]`` of bytes that `encode` gave.

        Raises:
            ValueError: they are of something else, of another place, or damaged.
        """
        if held.shape != (self.nbytes,) or held.dtype != torch.uint8:
            raise ValueError(f"xquant: a chunk has {self.nbytes} bytes here, not {list(held.shape)}")
        head, body = held[: _HEAD.size], held[_HEAD.size :].clone()
        magic, identity, first, checksum = _HEAD.unpack(bytes(head.tolist()))
        if magic != _MAGIC or identity != self._identity:
            raise ValueError("xquant: the chunk is of another model, method, calibration or chunk size")
        if checksum != _checksum(body):
            raise ValueError("xquant: the chunk is damaged")
        if start is not None and first not in (ANYWHERE, start):
            raise ValueError(f"xquant: the chunk begins at position {first}, not {start}")
        sizes = [self._sink_nbytes, 4 * self.tokens if self.needs_ids else 0]
        fields, exact, known = body.split([len(body) - sum(sizes), *sizes])
        starts, embedded = self._starts(first), self._embedded(known.clone().view(torch.int32))
        blocks = self.tokens // self._block
        packed, exact = fields.view(blocks, -1), exact.clone().view(self.dtype).view(self._sinks)
        rows, below, at = [], None, 0
        for layer, kept in zip(self._layers, exact, strict=True):
            own = packed[:, at : at + layer.layout.packed_nbytes]
            at += layer.layout.packed_nbytes
            of_blocks = torch.nn.functional.pad(kept[None], (0, 0, 0, 0, 0, blocks - 1))
            held_rows, below = layer.unpack(own, of_blocks, starts, below, embedded)
            rows.append(held_rows.flatten(0, 1))
        return torch.stack(rows)

    def _first(self, start: int | None, ids: Sequence[int] | None) -> int:
        """The position that a chunk is packed for."""
        if not self.needs_positions:
            return ANYWHERE
        if start is None or (self.needs_ids and (ids is None or len(ids) != self.tokens)):
            raise ValueError(
                "xquant: the method must be told the positions or ids of a chunk, which are unknown"
            )
        if start < 0 or start + self.tokens > self._longest:
            raise ValueError(f"xquant: position {start} is past the {self._longest} that the model allows")
        return start

    def _starts(self, first: int) -> Tensor:
        """The positions of blocks. Where they do not matter, no block is the first of a sequence."""
        begin = self._block if first == ANYWHERE else first
        return begin + torch.arange(0, self.tokens, self._block, device="cpu")

    def _embedded(self, ids: Tensor) -> Tensor | None:
        """What the method knows of the tokens by their ids, ``[1, T, E]``."""
        return None if self._embedding is None else look_up(self._embedding, ids[None])


def _checksum(body: Tensor) -> bytes:
    return hashlib.sha256(body.numpy().data).digest()
