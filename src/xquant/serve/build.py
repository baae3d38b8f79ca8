"""The codecs of an engine's layers: built for the heads of one shard, from its layers or from a checkpoint.

An engine may have packed a model's weights for its own products. So what is computed from them (bases of
`xquant`), or told by them (whose calibration it is), is read from the checkpoint's files.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from .. import calibration_store, compat, identity
from ..analysis.shapes import Skeleton
from ..calibration import Calibration, check
from ..codecs import fingerprint
from ..methods import LayerCodec, Method
from ..models import AttentionView
from ..past.angles import Angles
from ..past.pageable import of_states
from ..quant import Segment
from ..quant.grouped import Grouped

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of states."""
_OTHERS = ("bin", "pt", "pth", "gguf")
"""Endings of checkpoints that are not in safetensors."""


@dataclass(eq=False)
class EngineView(AttentionView):
    """An engine may have packed the weights for its own products, so their dtype says nothing."""

    given_dtype: torch.dtype = torch.float32

    @classmethod
    def of(
        cls,
        index: int,
        attention: Any,
        fused: Any,
        heads: tuple[int, int],
        size: int,
        key_norm: Any,
        rotary_size: int,
        dtype: torch.dtype,
    ) -> "EngineView":
        """Of an ``attention`` layer, or a shard of it, with these ``heads`` (of queries, of keys), whose
        projection ``fused`` gives queries, keys and values beside each other."""
        query_heads, kv_heads = heads
        queries, width = query_heads * size, kv_heads * size
        return cls(
            index=index,
            module=attention,
            norm=None,
            hidden=fused.input_size,
            kv_heads=kv_heads,
            query_heads=query_heads,
            head_size=size,
            key_module=fused,
            key_channels=slice(queries, queries + width),
            value_module=fused,
            value_channels=slice(queries + width, queries + 2 * width),
            key_norm=key_norm,
            rotary_size=rotary_size,
            given_dtype=dtype,
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.given_dtype


class Window(NamedTuple):
    """What a layer with a sliding window keeps."""

    tokens: int
    """Of the window."""
    width: int
    """Numbers of a token, in all shards."""


class State(NamedTuple):
    """What a layer with a state keeps of a sequence, in all shards."""

    channels: int
    """Of its convolution."""
    columns: int
    """Tokens that the convolution looks back at."""
    recurrent: int
    """Numbers of its recurrent state."""

    @classmethod
    def of(cls, layer: Any) -> "State":
        """Of a cache layer of transformers, which keeps the newest token of the convolution, too."""
        conv = compat.states_in(layer, compat.CONV_STATES)
        recurrent = sum(each.numel() for each in compat.states_in(layer, compat.RECURRENT_STATES))
        return cls(sum(each.shape[1] for each in conv), conv[0].shape[-1] - 1, recurrent)


@dataclass(frozen=True)
class Model:
    """A model as an engine knows it before it loads one."""

    config: Any
    """Of transformers."""
    dtype: torch.dtype
    """Of its keys and values."""
    folder: str = ""
    """Where its checkpoint is, or its name."""
    shards: int = 1
    """That its heads are divided among."""

    @cached_property
    def layers(self) -> Sequence[AttentionView]:
        """Those that a method compresses, without weights.

        Raises:
            ValueError: others are left, beside those with sliding windows or a state.
        """
        return _compressed(self._skeleton)

    @cached_property
    def windows(self) -> Mapping[Window, int]:
        """How many layers have sliding windows, by kind: an engine keeps these itself."""
        view = self._skeleton.view
        each = (layer for layer in view.layers if layer.index in view.windows)
        return Counter(Window(view.windows[layer.index], 2 * layer.kv_width) for layer in each)

    @cached_property
    def has_states(self) -> bool:
        """Whether layers keep a state, such as Mamba's, alone or beside tokens: an engine keeps it itself."""
        return any(map(compat.has_state, _own_layers(self._skeleton)))

    @cached_property
    def states(self) -> Mapping[State, int]:
        """How many layers keep a state, by its size.

        Raises:
            ValueError: the sizes cannot be found without weights.
        """
        return Counter(map(State.of, self._skeleton.stateful))

    @cached_property
    def identity(self) -> str:
        """What its keys and values depend on: its configuration, and its checkpoint.

        Raises:
            ValueError: there is none in its folder.
        """
        folder = Path(self.folder)
        if files := sorted(folder.glob("*.safetensors")):
            weights = identity.of_tensors(_tensors(files))
        elif files := sorted(each for kind in _OTHERS for each in folder.glob(f"*.{kind}")):
            weights = " ".join(_digest(each) for each in files)
        else:
            raise ValueError(f"xquant: whose blocks these are cannot be told: no weights in '{self.folder}'")
        return f"{identity.of_configuration(self.config)} {weights}"

    def rope(self, view: AttentionView) -> Any:
        """The parameters of a layer's RoPE, which a configuration may have by kind of layer."""
        found = getattr(self.config, "rope_parameters", None)
        kinds = getattr(self.config, "layer_types", None)
        return found.get(kinds[view.index], found) if found and kinds else found

    def angles(self) -> Angles:
        """Of every position that it allows.

        Raises:
            ValueError: its RoPE has other frequencies for long inputs.
        """
        return Angles.of(self._skeleton.view.rope, self.longest, torch.device("cpu"))

    @property
    def longest(self) -> int:
        """How many positions it allows."""
        return int(getattr(self.config, "max_position_embeddings", 0) or 0)

    @cached_property
    def _skeleton(self) -> Skeleton:
        return Skeleton(self.config, self.dtype)

    @cached_property
    def weighted(self) -> Sequence[AttentionView]:
        """With the key and value projections and key norms of the checkpoint.

        Raises:
            ValueError: they cannot be read.
        """
        if not self.folder:
            raise ValueError("it depends on a model's weights, and a shape has none")
        skeleton = Skeleton(self.config, self.dtype)
        layers = _compressed(skeleton)
        modules = [(v.key_module, v.value_module, v.key_norm) for v in layers]
        read = {id(p) for each in modules for m in each if m is not None for p in m.parameters()}
        wanted = {name for name, p in skeleton.model.named_parameters() if id(p) in read}
        found: dict[str, Tensor] = {}
        for file in sorted(Path(self.folder).glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                names = wanted.intersection(opened.keys())
                found |= {name: opened.get_tensor(name).to(self.dtype) for name in names}
        if missing := wanted - found.keys():
            raise ValueError(f"no '{min(missing)}' in the safetensors files of '{self.folder}'")
        skeleton.model.load_state_dict(found, strict=False, assign=True)
        return layers


def _tensors(files: Sequence[Path]) -> Iterator[tuple[str, Tensor]]:
    """All tensors of these files, one at a time, by name."""
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in sorted(opened.keys()):
                yield name, opened.get_tensor(name)


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _own_layers(skeleton: Skeleton) -> Sequence[Any]:
    """What transformers' own cache has of each layer."""
    return compat.default_layers(compat.text_config(skeleton.model))


def _compressed(skeleton: Skeleton) -> Sequence[AttentionView]:
    view, own = skeleton.view, _own_layers(skeleton)
    for index, why in view.skipped.items():
        if index not in view.windows and not compat.has_state(own[index]):
            raise ValueError(f"layer {index}: {why}")
    if not view.rope.width:
        raise ValueError("a model without rotary embedding is not served yet")
    if any(layer.latents or layer.value_size != layer.head_size for layer in view.layers):
        raise ValueError("latents (MLA), or values of another size than keys, are not served yet")
    if any(layer.norms_all_heads for layer in view.compressed):
        raise ValueError("a key norm over all heads is not served yet")
    return view.compressed


def calibration_for(method: Method, model: Model, file: str | None) -> Calibration | None:
    """The calibration of a method for a model: that of a ``file``, or a stored one.

    Raises:
        ValueError: there is none where one is needed, or it is of another method or model.
    """
    if not method.needs_calibration:
        if file is not None:
            raise ValueError("it needs no calibration")
        return None
    found = None
    try:
        if file is not None:
            found = Calibration.load(file)
            found.check(method.calibrated_as, fingerprint(model.weighted))
        elif method.calibrates_itself:
            expected = method.expected(model.layers)
            found = calibration_store.find(method.calibrated_as, fingerprint(model.weighted), expected)
    except OSError as error:
        raise ValueError(str(error)) from None
    if found is None:
        option = "xquant_calibration=FILE of an engine, calibration=FILE of what stores"
        raise ValueError(f"{method.how_to_calibrate}; here it is {option}")
    return found


def cut_by_head(calibration: Calibration, method: Method, model: Model, rank: int) -> Calibration:
    """What a calibration says of the heads of one shard: of what is by channel, its channels.

    Raises:
        ValueError: it is of all heads together.
    """
    whole, part = (
        method.expected(layers) for layers in (model.layers, shard_of(model.layers, rank, model.shards))
    )
    check(calibration.tensors, whole)
    found = dict(calibration.tensors)
    for name, wanted in part.items():
        shape, own = whole[name].shape, wanted.shape
        if own == shape:
            continue
        if own != (*shape[:-1], shape[-1] // model.shards) or "." not in name.partition(".")[2]:
            raise ValueError("its calibration is of all heads together, and a shard has some of them")
        found[name] = found[name][..., rank * own[-1] : (rank + 1) * own[-1]]
    return replace(calibration, tensors=found)


def codecs_of(
    method: Method,
    layers: Sequence[AttentionView],
    calibration: Calibration | None,
    at_heads: bool = False,
) -> list[LayerCodec]:
    """One codec for each of the ``layers`` of a shard, whose features are keys and values.

    Args:
        at_heads: let ranges of tokens end at heads, so that a shard makes the codes of one process.

    Raises:
        ValueError: options that the model does not allow.
    """
    found = of_states(method.codecs(layers, calibration))
    if at_heads:
        for codec in found:
            codec.segments = tuple(_cut_at_heads(s, codec.view) for s in codec.segments)
    return found


def _cut_at_heads(segment: Segment, view: AttentionView) -> Segment:
    quantizer, size = segment.quantizer, view.head_size
    if not isinstance(quantizer, Grouped) or quantizer.per != "token":
        return segment
    ranges = -(-size // quantizer.group) if quantizer.group else 1
    if size % ranges:
        raise ValueError(f"heads of {size} channels have no ranges of {quantizer.group} of one size")
    return replace(segment, quantizer=replace(quantizer, group=size // ranges))


def shard_of(layers: Sequence[AttentionView], rank: int, shards: int) -> list[AttentionView]:
    """The heads of the layers that one of ``shards`` holds.

    Raises:
        ValueError: they cannot be divided.
    """
    if any(v.kv_heads % shards or v.query_heads % shards for v in layers):
        raise ValueError(f"{layers[0].kv_heads} key/value heads cannot be divided by {shards}")
    return [_part(view, rank, shards) for view in layers]


def _part(view: AttentionView, rank: int, shards: int) -> AttentionView:
    width = view.kv_width // shards

    def own(rows: slice | Tensor) -> slice:
        assert isinstance(rows, slice)  # shapes alone are asked, see `find.py`
        start = (rows.start or 0) + rank * width
        return slice(start, start + width)

    return replace(
        view,
        kv_heads=view.kv_heads // shards,
        query_heads=view.query_heads // shards,
        key_channels=own(view.key_channels),
        value_channels=own(view.value_channels),
        _offline={},
    )
