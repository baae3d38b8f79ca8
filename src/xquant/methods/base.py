"""What a method is: a frozen dataclass of options that builds one codec per attention layer.

A *codec* (`codec`) says which features of a token a layer keeps, how they are packed, and how keys and values
come back. Everything else (appending, sealing, sinks, tail, crop, reorder) is done once for all methods, in
`xquant.store`. Bytes are what quantizers say of themselves.

Options are read, checked and listed without torch, which takes seconds to import. What makes codecs imports
it where it is called.
"""

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..calibration import Calibration, Expected
    from ..models import AttentionView
    from ..quant import Quantizer
    from ..quant.quantizer import Granularity
    from .codec import LayerCodec

BITS = (1, 2, 3, 4, 5, 6, 7, 8, 16)

ROPE: dict[str, Any] = {
    "choices": ("pre", "post"),
    "help": "quantize keys before or after RoPE",
}
TAIL: dict[str, Any] = {"help": "most recent tokens kept full, at least (residual length)"}
CALIBRATED_AT = 2
"""The bits in the name of an artifact that is for any number of bits."""
GROUP: dict[str, Any] = {"help": "quantization group; also the tokens of a sealed block"}


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
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
    """Whether the text may be one that the model writes, without being asked."""
    uncalibrated: ClassVar[str] = ""
    """Options with which it needs no calibration, where it otherwise does."""
    sized_by_calibration: ClassVar[bool] = False
    """Whether its bytes depend on what a calibration finds, and are planned without one only roughly."""
    not_causal: ClassVar[str] = ""
    """What it does where it is not `causal`."""
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    """Named sets of options: ``preset=NAME`` in a spec."""

    sink: int = field(default=0, metadata={"help": "first tokens of a sequence kept full"})
    tail: int = field(default=0, metadata=TAIL)
    group: int = field(default=128, metadata=GROUP)

    def __post_init__(self) -> None:
        for option in dataclasses.fields(self):
            self._check(option.name, getattr(self, option.name), option.metadata)
        if self.group < 1:
            raise ValueError(f"{self.name}: group={self.group} is below 1")

    def _check(self, name: str, value: Any, meta: Mapping[str, Any]) -> None:
        choices = meta.get("choices")
        if choices is not None and value is not None and value not in choices:
            allowed = ", ".join(map(str, choices))
            raise ValueError(f"{self.name}: {name}={_plain(value)} is not one of {allowed}")
        if choices is None and isinstance(value, int | float):
            least, most = meta.get("least", 0), meta.get("most")
            if not value >= least:
                raise ValueError(f"{self.name}: {name}={_plain(value)} is below {least}")
            if most is not None and value > most:
                raise ValueError(f"{self.name}: {name}={_plain(value)} is above {most}")
            if value % (step := meta.get("step", value or 1)):
                raise ValueError(f"{self.name}: {name}={_plain(value)} is not a multiple of {step}")

    @property
    def needs_calibration(self) -> bool:
        """Whether `codecs` wants what `xquant.calibrate` finds."""
        return False

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

    def expected(self, views: "Sequence[AttentionView]") -> "dict[str, Expected]":
        """The tensors of a calibration for layers like ``views``; none where none is needed."""
        return {}

    def found(
        self, views: "Sequence[AttentionView]", calibration: "Calibration | None"
    ) -> "list[dict[str, Tensor]]":
        """What a calibration holds of each layer, all of it as it is `expected`.

        Raises:
            ValueError: it is not, or there is none where one is needed.
        """
        if calibration is None:
            if self.needs_calibration:
                raise ValueError(self.how_to_calibrate)
            return [{} for _ in views]
        from ..calibration import check

        check(calibration.tensors, self.expected(views))
        return [calibration.layer(i) for i in range(len(views))]

    @property
    def causal(self) -> bool:
        """Whether what a layer stores of a token needs nothing of a layer above it or of later tokens, so
        that a token can attend to itself as it is stored."""
        return True

    @property
    def dense(self) -> "Method":
        """The method without what it keeps sparsely beside its codes; itself where that is nothing."""
        return self

    @abstractmethod
    def codecs(
        self, views: "Sequence[AttentionView]", calibration: "Calibration | None" = None
    ) -> "list[LayerCodec]":
        """One codec for each compressed layer, bottom up. Offline work (SVD) is done here.

        Raises:
            ValueError: options that the model does not allow.
        """

    @classmethod
    def option_help(cls) -> dict[str, str]:
        """Options that may follow the colon of a spec, with their meaning and default."""
        helps = {}
        for option in cls.options():
            text = option.metadata["help"]
            if "choices" in option.metadata:
                text += f" ({'|'.join(map(str, option.metadata['choices']))})"
            helps[option.name] = f"{text}, default {_plain(option.default)}"
        if cls.presets:
            helps["preset"] = f"a configuration of the paper: {', '.join(cls.presets)}"
        return helps

    @classmethod
    def options(cls) -> list["dataclasses.Field[Any]"]:
        """The options that do not stand in the name of a spec (as ``bits`` does)."""
        return [f for f in dataclasses.fields(cls) if f.name not in cls.head_fields()]

    @classmethod
    def head_fields(cls) -> set[str]:
        """Options that stand in the name of a spec rather than after the colon."""
        return set(re.compile(cls.head_pattern).groupindex)

    @property
    def head(self) -> str:
        """The spec before its colon."""
        return self.name

    @property
    def spec(self) -> str:
        """The canonical spec string: options at their default are left out."""
        values = {f.name: (getattr(self, f.name), f.default) for f in self.options()}
        changed = [f"{k}={_plain(v)}" for k, (v, default) in values.items() if v != default]
        return self.head + (":" + ",".join(changed) if changed else "")

    def __str__(self) -> str:
        return self.spec


def _plain(value: Any) -> str:
    if value is None:
        return "auto"
    if isinstance(value, float):
        return short(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def short(number: float) -> str:
    """A number as it stands in a spec: whole where it is, never with an exponent."""
    return format(Decimal(repr(number)), "f").removesuffix(".0")


def bits_field(
    default: Any = dataclasses.MISSING, choices: Sequence[int] = BITS, **meta: Any
) -> Any:
    return field(default=default, metadata={"choices": choices, "help": "bits per code", **meta})


@dataclass(frozen=True, kw_only=True)
class QuantizedMethod(Method):
    """Options that every method with one width of codes shares."""

    head_pattern: ClassVar[str] = r"-(?P<bits>\d+)bit"

    bits: int = bits_field()
    first_layers: int = field(default=0, metadata={"help": "lowest layers given first_bits"})
    first_bits: int = bits_field(4, help="bits of the first_layers")

    @property
    def head(self) -> str:
        return f"{self.name}-{self.bits}bit"

    def layer_bits(self, position: int) -> int:
        """Bits of the compressed layer at ``position``, counted from the bottom."""
        return self.first_bits if position < self.first_layers else self.bits

    def quantizer(self, bits: int, per: "Granularity", dtype: "torch.dtype") -> "Quantizer":
        """Affine codes, or (16 bits) rows in the model's own ``dtype``."""
        from .codec import affine_or_plain

        return affine_or_plain(bits, per, self.group, dtype)


@dataclass(frozen=True, kw_only=True)
class CodedMethod(QuantizedMethod):
    """The same, of methods that always quantize: no layer is kept in 16 bits."""

    bits: int = bits_field(choices=range(1, 9))
    first_bits: int = bits_field(4, choices=range(1, 9), help="bits of the first_layers")
