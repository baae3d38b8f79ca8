"""The serde ``xquant`` of LMCache: chunks packed by a method, of one size for a model and a chunk."""

from typing import Any

import torch
from lmcache.v1.distributed.serde import (
    AsyncSerdeProcessor,
    Deserializer,
    SerdeProcessor,
    Serializer,
    register_serde_factory,
)
from lmcache.v1.distributed.serde.factory import get_registered_serde_types
from transformers import AutoConfig

from xquant.serve.build import DTYPES, Model
from xquant.serve.chunk import ChunkCoder
from xquant.serve.fit import Wanted, parse

from .places import Places
from .states import LAYOUTS, Heads, check, layout_of, rows_of, write_rows

NAME = "xquant"
_OPTIONS = {"model", "method", "calibration", "layout", "max_workers"}


def register() -> None:
    """Have LMCache know the serde; once for a process."""
    if NAME not in get_registered_serde_types():
        register_serde_factory(NAME, make)


def make(options: dict[str, Any]) -> SerdeProcessor:
    """The serde of these options.

    Args:
        options: ``model``, the folder or name of a checkpoint; ``method``, a spec; ``calibration``, a file,
            for methods that do not find theirs; ``layout`` of states, where it is not `states.layout_of`
            them; ``max_workers``.

    Raises:
        ValueError: an option that is unknown or no such thing, or what cannot be served.
    """
    if unknown := options.keys() - _OPTIONS:
        known = ", ".join(sorted(_OPTIONS))
        raise ValueError(f"xquant: a serde has no option '{min(unknown)}': one of {known}")
    layout = options.get("layout")
    if layout not in (None, *LAYOUTS):
        raise ValueError(f"xquant: 'layout' is one of {', '.join(LAYOUTS)}, not {layout!r}")
    model = options.get("model")
    if not isinstance(model, str) or not model:
        raise ValueError("xquant: a serde needs the 'model' whose states it packs")
    wanted = Wanted(parse(options.get("method")), calibration=options.get("calibration"))
    coding = Coding(model, wanted, layout)
    workers = int(options.get("max_workers", 1))
    return AsyncSerdeProcessor(Packing(coding), Unpacking(coding), max_workers=workers)


class Coding:
    """What packs chunks of one model, of whatever size LMCache has.

    Args:
        folder: of the checkpoint, or its name.
        wanted: the method.
        layout: of states; None: what `states.layout_of` tells.
    """

    def __init__(self, folder: str, wanted: Wanted, layout: str | None) -> None:
        self._config, self._folder = AutoConfig.from_pretrained(folder).get_text_config(decoder=True), folder
        self._wanted, self._layout = wanted, layout
        self._coders: dict[tuple[int, torch.dtype], ChunkCoder] = {}
        coder = self._coder(wanted.method.group, torch.float32)  # what cannot be served is refused now
        # At once: LMCache's server says where a chunk stands as it stores it, and to listeners alone.
        self._places = Places() if coder.needs_positions else None

    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Of a chunk whose states are of this shape."""
        return self._for(shape, dtype)[0].nbytes

    def pack(self, states: Any, name: bytes) -> Any:
        """The bytes of a chunk with this hash."""
        coder, heads = self._for(tuple(states.shape), states.dtype)
        place = None if self._places is None else self._places.of(name)
        rows = rows_of(states, self._layout_of(states.shape), heads)
        return coder.encode(rows) if place is None else coder.encode(rows, place.start, place.ids)

    def unpack(self, held: Any, states: Any) -> None:
        """Write the states of a chunk that was packed."""
        coder, heads = self._for(tuple(states.shape), states.dtype)
        write_rows(coder.decode(held), states, self._layout_of(states.shape), heads)

    def _for(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[ChunkCoder, Heads]:
        view = self._coder(self._wanted.method.group, dtype).view
        heads = Heads(view.kv_heads, view.head_size)
        return self._coder(check(shape, dtype, self._layout_of(shape), heads), dtype), heads

    def _layout_of(self, shape: tuple[int, ...]) -> str:
        return self._layout or layout_of(shape)

    def _coder(self, tokens: int, dtype: torch.dtype) -> ChunkCoder:
        if dtype not in DTYPES:
            raise ValueError(f"xquant: {dtype} states are not served")
        if (tokens, dtype) not in self._coders:
            model = Model(self._config, dtype, self._folder)
            self._coders[tokens, dtype] = ChunkCoder(model, self._wanted, tokens)
        return self._coders[tokens, dtype]


class Packing(Serializer):
    """States to bytes."""

    def __init__(self, coding: Coding) -> None:
        self._coding = coding

    def serialize(self, src: Any, dst: Any, key: Any) -> int:
        states, room = _tensors(src, dst)
        packed = self._coding.pack(states, key.chunk_hash)
        room.flatten()[: len(packed)].copy_(packed)
        return len(packed)

    def estimate_serialized_size(self, layout_desc: Any) -> int:
        if len(layout_desc.shapes) != 1:
            raise ValueError("xquant: chunks of several groups of layers are not served")
        return self._coding.nbytes(tuple(layout_desc.shapes[0]), layout_desc.dtypes[0])


class Unpacking(Deserializer):
    """Bytes to states."""

    def __init__(self, coding: Coding) -> None:
        self._coding = coding

    def deserialize(self, src: Any, dst: Any, key: Any) -> None:
        held, states = _tensors(src, dst)
        nbytes = self._coding.nbytes(tuple(states.shape), states.dtype)
        self._coding.unpack(held.flatten()[:nbytes], states)


def _tensors(*given: Any) -> list[Any]:
    found = [each.tensor for each in given]
    if any(tensor is None for tensor in found):
        raise ValueError("xquant: an object of LMCache has no tensor")
    return found
