"""What a method is: a frozen dataclass of options that builds one codec per attention layer.

A *codec* (`codec`) says which features of a token a layer keeps, how they are packed, and how keys and values
come back. Everything else (appending, sealing, sinks, tail, crop, reorder) is done once for all methods, in
`xquant.past`. Bytes are what quantizers say of themselves.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from .. import catalogue
from ..calibration import Calibration, Expected
from ..calibration import check as check_calibration
from ..models import AttentionView
from ..quant import Affine, Plain, Quantizer
from ..quant.quantizer import Granularity
from . import widths
from .codec import LayerCodec

Each = TypeVar("Each")
Tensors = dict[str, Tensor]
"""What a calibration holds, by name."""

BITS = (1, 2, 3, 4, 5, 6, 7, 8, 16)

OWN_TEXTS = 256, 60
"""Tokens of a text and texts that a model writes for a method that calibrates itself: the same for all such
methods, so that they share the texts."""

CALIBRATED_AT = 2
"""The bits in the name of an artifact that is for any number of bits."""

SINK = "first tokens of a sequence kept full"
TAIL = "most recent tokens kept full, at least (residual length)"
GROUP = "quantization group; also the tokens of a sealed block"
ROPE: dict[str, Any] = {"help": "quantize keys before or after RoPE", "choices": ("pre", "post")}


def option(default: Any = dataclasses.MISSING, help: str = "", **allowed: Any) -> Any:
    """An option of a method: a field of its dataclass.

    Args:
        default: a spec must give the option where there is none.
        help: what ``xquant methods`` says of it.
        allowed: its ``choices``, or the bounds of a number: ``least`` (0 by default), ``most``, and ``step``,
            of which it is a multiple.
    """
    return field(default=default, metadata={"help": help, **allowed})


@dataclass(frozen=True, kw_only=True)
class Method:
    """A compression method and its options: what every method is derived from.

    A method can be compared, hashed and written as a spec string.

    Examples:
        >>> from xquant import Kivi, Method
        >>> method = Kivi(bits=4, tail=128)
        >>> method.spec
        'kivi-4bit:tail=128'
        >>> isinstance(method, Method), method.needs_calibration
        (True, False)
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    summary: ClassVar[str]
    example: ClassVar[str]
    head_pattern: ClassVar[str] = ""
    """What follows the name in a spec, before the colon; its groups are named after options."""
    calibration_size: ClassVar[tuple[int, int]] = (2048, 16)
    """Tokens of a sample and samples that a calibration reads by default."""
    calibrates_itself: ClassVar[bool] = False
    """Whether it needs a calibration whose text may be one that the model writes, without being asked."""
    uncalibrated: ClassVar[str] = ""
    """Options with which it needs no calibration, where it otherwise does."""
    sized_by_calibration: ClassVar[bool] = False
    """Whether its bytes depend on what a calibration finds, and are planned without one only roughly."""
    not_causal: ClassVar[str] = ""
    """What it does where it is not `causal`."""
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    """Named sets of options: ``preset=NAME`` in a spec."""

    sink: int = option(0, SINK)
    tail: int = option(0, TAIL)
    group: int = option(128, GROUP)

    def __post_init__(self) -> None:
        for option in dataclasses.fields(self):
            catalogue.check(self.name, option.name, getattr(self, option.name), option.metadata)
        if self.group < 1:
            raise ValueError(f"{self.name}: group={self.group} is below 1")

    @property
    def needs_calibration(self) -> bool:
        """Whether `codecs` wants what `xquant.calibrate` finds."""
        return self.calibrates_itself

    @property
    def built_from_weights(self) -> bool:
        """Whether codecs hold what was computed from the model's projections."""
        return self.needs_calibration

    @property
    def how_to_calibrate(self) -> str:
        """What to tell someone who has no artifact."""
        if self.calibrates_itself:
            return (
                f"{self.spec} needs a calibration: the commands of xquant make one when they first meet a"
                " model, xquant.own_calibration(model, tokenizer, method) makes one in Python, in minutes;"
                " both are kept"
            )
        return (
            f"{self.spec} needs a calibration: 'xquant calibrate MODEL --method {self.calibrated_as}"
            " --output FILE' makes one, for --calibration FILE or KVCache(..., calibration=FILE)"
        )

    @property
    def calibrated_as(self) -> str:
        """The spec without the options that calibrating does not depend on."""
        return dataclasses.replace(self, tail=0).spec if self.needs_calibration else self.spec

    def expected(self, views: Sequence[AttentionView]) -> dict[str, Expected]:
        """The tensors of a calibration for layers like ``views``; none where none is needed."""
        layers = map(self.expected_of, views)
        return {f"{i}.{name}": of for i, layer in enumerate(layers) for name, of in layer.items()}

    def expected_of(self, view: AttentionView) -> dict[str, Expected]:
        """Those of one layer, of methods that expect the same of each."""
        return {}

    def found(self, views: Sequence[AttentionView], calibration: Calibration | None) -> list[Tensors]:
        """What a calibration holds of each layer, all of it as it is `expected`.

        Raises:
            ValueError: it is not, or there is none where one is needed.
        """
        if calibration is None:
            if self.needs_calibration:
                raise ValueError(self.how_to_calibrate)
            return [{} for _ in views]
        check_calibration(calibration.tensors, self.expected(views))
        return [calibration.layer(i) for i in range(len(views))]

    @property
    def causal(self) -> bool:
        """Whether what a layer stores of a token needs nothing of a layer above it or of later tokens, so
        that a token can attend to itself as it is stored."""
        return True

    def codecs(
        self, views: Sequence[AttentionView], calibration: Calibration | None = None
    ) -> list[LayerCodec]:
        """One codec for each compressed layer, bottom up. Offline work (SVD) is done here.

        Raises:
            ValueError: options or a calibration that the model does not allow.
        """
        found = self.found(views, calibration)
        return [self.codec(view, i, found[i]) for i, view in enumerate(views)]

    def codec(self, view: AttentionView, position: int, found: Tensors) -> LayerCodec:
        """The codec of the layer at ``position``, counted from the bottom, from what a calibration holds of
        it. Methods whose layers depend on each other define `codecs` instead."""
        raise NotImplementedError

    def quantizer(self, bits: int, per: Granularity, dtype: torch.dtype) -> Quantizer:
        """Affine codes, or (16 bits) rows in the model's own ``dtype``."""
        return Plain(dtype) if bits == 16 else Affine(bits, per, self.group)

    @classmethod
    @cache
    def entry(cls) -> catalogue.Entry:
        """What the class says of itself, for whoever reads specs or lists methods.

        Raises:
            ValueError: its example is none of its specs.
        """
        entry = catalogue.Entry(
            name=cls.name,
            example=cls.example,
            paper=cls.paper,
            summary=cls.summary,
            calibration=catalogue.NONE,
            uncalibrated=cls.uncalibrated,
            head_pattern=cls.head_pattern,
            options={option.name: _described(option) for option in dataclasses.fields(cls)},
            presets=cls.presets,
        )
        _, values = catalogue.read_spec(cls.example, lambda _: {cls.name: entry})
        if not cls(**values).needs_calibration:
            return entry
        source = catalogue.ITS_OWN if cls.calibrates_itself else catalogue.FROM_A_TEXT
        return dataclasses.replace(entry, calibration=source)

    @property
    def head(self) -> str:
        """The spec before its colon."""
        return self.name

    @property
    def spec(self) -> str:
        """The canonical spec string: options at their default are left out."""
        changed = [
            f"{name}={catalogue.plain(value)}"
            for name, option in self.entry().after_colon().items()
            if (value := getattr(self, name)) != option.get("default")
        ]
        return self.head + (":" + ",".join(changed) if changed else "")

    def __str__(self) -> str:
        return self.spec


def _described(option: "dataclasses.Field[Any]") -> dict[str, Any]:
    """An option as a catalogue has it, in what JSON can hold."""
    kind = option.type
    described = {"type": kind.__name__ if isinstance(kind, type) else str(kind), **option.metadata}
    if option.default is not dataclasses.MISSING:
        described["default"] = option.default
    if "choices" in described:
        described["choices"] = list(described["choices"])
    return described


@dataclass(frozen=True, kw_only=True)
class QuantizedMethod(Method):
    """Options that every method with one width of codes shares."""

    head_pattern: ClassVar[str] = r"-(?P<bits>\d+)bit"

    bits: int = option(help="bits per code", choices=BITS)
    first_layers: int = option(0, "lowest layers given first_bits")
    first_bits: int = option(4, "bits of the first_layers", choices=BITS)

    @property
    def head(self) -> str:
        return f"{self.name}-{self.bits}bit"

    def layer_bits(self, position: int) -> int:
        """Bits of the compressed layer at ``position``, counted from the bottom."""
        return self.first_bits if position < self.first_layers else self.bits


@dataclass(frozen=True, kw_only=True)
class LayeredMethod(QuantizedMethod):
    """The same, of methods whose layers do not depend on each other: each may have bits of its own, and its
    keys other bits than its values."""

    beside_layers: ClassVar[dict[str, Any]] = {"first_layers": 0}
    """Other options that say bits by layer, with the values that say nothing."""

    layers: str = option("", "bits by layer, bottom up: 2x4+k3v2 is 4 of two, then 3 of keys, 2 of values")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.layers:
            return
        for name, nothing in self.beside_layers.items():
            if getattr(self, name) != nothing:
                raise ValueError(
                    f"{self.name}: give either layers or {name}: layers has bits of keys and values itself,"
                    " as layers=k4v2 has"
                )
        allowed = {each.name: each.metadata for each in dataclasses.fields(self)}["bits"]
        for bits in sorted({bits for each in self.used_widths for bits in each}):
            catalogue.check(self.name, f"layers={self.layers}: bits", bits, allowed)

    @property
    def _runs(self) -> widths.Runs:
        try:
            return widths.read(self.layers)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None

    @property
    def used_widths(self) -> set[widths.Widths]:
        """All that `layer_widths` may be."""
        if self.layers:
            return {each for each in (*self._runs.counted, self._runs.rest) if each is not None}
        return {widths.Widths(bits, bits) for bits in (self.bits, self.first_bits)}

    def layer_widths(self, position: int) -> widths.Widths:
        """Bits of keys and of values of the compressed layer at ``position``, counted from the bottom."""
        if self.layers:
            return self._runs.at(position)
        bits = self.layer_bits(position)
        return widths.Widths(bits, bits)

    def with_widths(self, layers: Iterable[widths.Widths]) -> Self:
        """The method with these bits in all layers, bottom up."""
        return dataclasses.replace(self, layers=widths.write(layers), **self.beside_layers)

    def codecs(
        self, views: Sequence[AttentionView], calibration: Calibration | None = None
    ) -> list[LayerCodec]:
        if self.layers and not self._runs.fits(len(views)):
            raise ValueError(
                f"{self.name}: layers={self.layers} is of {len(self._runs.counted)} layers, but {len(views)}"
                " are compressed in this model"
            )
        return super().codecs(views, calibration)


@dataclass(frozen=True, kw_only=True)
class CodedMethod(LayeredMethod):
    """The same, of methods that always quantize: no layer is kept in 16 bits."""

    bits: int = option(help="bits per code", choices=range(1, 9))
    first_bits: int = option(4, "bits of the first_layers", choices=range(1, 9))


def spans(layers: Sequence[Each], size: int) -> list[Sequence[Each]]:
    """Layers, bottom up, ``size`` at a time; the last span may have fewer."""
    return [layers[start : start + size] for start in range(0, len(layers), size)]
