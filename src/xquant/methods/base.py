"""What a method is: a frozen dataclass of options that builds one codec per attention layer.

A *codec* says which features of a token a layer keeps, how they are packed, and how keys and values
come back. Everything else (appending, sealing, sinks, tail, crop, reorder, bytes) is done once, in
`xquant.cache`, for every method.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ..models import AttentionView
from ..quant import Affine, Plain, Quantizer, Segment
from ..quant.quantizer import Granularity

BITS = (1, 2, 3, 4, 8, 16)


@dataclass
class Seen:
    """What one attention layer saw of ``T`` new tokens."""

    x: Tensor  # post-norm input [B, T, d]
    residual: Tensor  # input of the norm [B, T, d]
    raw_key: Tensor  # output of the key projection, before norm and RoPE [B, T, G*D]
    key: Tensor  # as the model gives it to a cache, rotated [B, G, T, D]
    value: Tensor  # [B, G, T, D]

    def last(self, count: int) -> "Seen":
        """The newest ``count`` tokens of it."""
        x, residual, raw_key = (t[:, -count:] for t in (self.x, self.residual, self.raw_key))
        return Seen(x, residual, raw_key, self.key[:, :, -count:], self.value[:, :, -count:])


class LayerCodec(ABC):
    """One layer's way from features to packed rows to keys and values.

    Letters: ``W`` channels of a feature row, ``C`` channels of a packed row, ``n`` tokens of a block.
    """

    segments: tuple[Segment, ...]
    width: int
    """``W``."""
    reads_below: bool = False
    """Whether `encode` and `recall` need what the layer below carries."""
    feeds_above: bool = False
    """Whether the layer above needs what this layer carries."""
    rotated: bool = False
    """Whether keys are stored after RoPE."""

    def __init__(self, view: AttentionView) -> None:
        self.view = view

    @property
    def nbytes(self) -> int:
        """Bytes of weights that the codec adds to the model's own (bases, fused projections)."""
        own = {id(t): t for t in vars(self).values() if isinstance(t, Tensor)}
        model = {t.data_ptr() for t in (self.view.key_weight, self.view.value_weight)}
        return sum(t.nbytes for t in own.values() if t.data_ptr() not in model)

    @abstractmethod
    def features(self, seen: Seen) -> Tensor:
        """The rows to keep, ``[B, T, W]``: copies or elementwise functions of what was seen, so that
        a token's row does not depend on which tokens came with it."""

    def encode(self, features: Tensor, below: Tensor | None) -> Tensor:
        """Rows to pack, ``[B, m, n, C]``, of ``m`` blocks of features ``[B, m, n, W]``."""
        return features

    def recall(self, rows: Tensor, below: Tensor | None) -> Tensor:
        """What `rebuild` works on, from decoded rows ``[B, T, C]``."""
        return rows

    def carry(self, recalled: Tensor) -> Tensor:
        """What the layer above gets as ``below``, ``[B, T, W]``, in the space of the features."""
        return recalled

    @abstractmethod
    def rebuild(self, recalled: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (before RoPE unless `rotated`) and values, two ``[B, T, G*D]``."""

    def exact(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """The same from features that were never packed (sinks and tail)."""
        return self.rebuild(features)


def by_block(x: Tensor, weight: Tensor, block: int) -> Tensor:
    """``x @ weight.T`` for ``x`` ``[B, T, C]``, computed block by block.

    A matrix product may round differently for another number of rows. Codes must not depend on
    whether a block arrived alone or with others, so each block is its own product.
    """
    return torch.cat([F.linear(part, weight) for part in x.split(block, 1)], 1)


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """A compression method and its options; hashable, comparable, written as a spec string."""

    name: ClassVar[str]
    paper: ClassVar[str]
    summary: ClassVar[str]
    example: ClassVar[str]
    needs_calibration: ClassVar[bool] = False

    sink: int = field(default=0, metadata={"help": "first tokens of a sequence kept full"})
    tail: int = field(default=0, metadata={"help": "most recent tokens kept full, at least"})
    group: int = field(
        default=128, metadata={"help": "quantization group; also the tokens of a sealed block"}
    )

    def __post_init__(self) -> None:
        for option in dataclasses.fields(self):
            value, choices = getattr(self, option.name), option.metadata.get("choices")
            if choices is not None:
                if value not in choices:
                    allowed = ", ".join(map(str, choices))
                    raise ValueError(f"{self.name}: {option.name}={value} is not one of {allowed}")
            elif isinstance(value, int) and value < option.metadata.get("least", 0):
                least = option.metadata.get("least", 0)
                raise ValueError(f"{self.name}: {option.name}={value} is below {least}")
        if self.group < 1:
            raise ValueError(f"{self.name}: group={self.group} is below 1")

    @abstractmethod
    def codecs(self, views: Sequence[AttentionView]) -> list[LayerCodec]:
        """One codec for each compressed layer, bottom up. Offline work (SVD) is done here."""

    @classmethod
    def head_fields(cls) -> tuple[str, ...]:
        """Options that stand in the name of a spec (``xquant-4bit``) rather than after the colon."""
        return ("bits",) if "bits" in {f.name for f in dataclasses.fields(cls)} else ()

    @classmethod
    def option_help(cls) -> dict[str, str]:
        """Options that may follow the colon of a spec, with their meaning and default."""
        helps = {}
        for option in dataclasses.fields(cls):
            if option.name not in cls.head_fields():
                text = option.metadata["help"]
                if "choices" in option.metadata:
                    text += f" ({'|'.join(map(str, option.metadata['choices']))})"
                helps[option.name] = f"{text}, default {_plain(option.default)}"
        return helps

    @property
    def spec(self) -> str:
        """The canonical spec string: options at their default are left out."""
        head = self.name + "".join(f"-{getattr(self, name)}bit" for name in self.head_fields())
        options = [
            f"{f.name}={_plain(getattr(self, f.name))}"
            for f in dataclasses.fields(self)
            if f.name not in self.head_fields() and getattr(self, f.name) != f.default
        ]
        return head + (":" + ",".join(options) if options else "")

    def __str__(self) -> str:
        return self.spec


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def bits_field(default: int | dataclasses._MISSING_TYPE = dataclasses.MISSING, **meta: Any) -> Any:
    return field(default=default, metadata={"choices": BITS, "help": "bits per code", **meta})


@dataclass(frozen=True, kw_only=True)
class QuantizedMethod(Method):
    """Options that every quantizing method shares."""

    bits: int = bits_field()
    first_layers: int = field(default=0, metadata={"help": "lowest layers given first_bits"})
    first_bits: int = bits_field(4, help="bits of the first_layers")

    def layer_bits(self, position: int) -> int:
        """Bits of the compressed layer at ``position``, counted from the bottom."""
        return self.first_bits if position < self.first_layers else self.bits

    def quantizer(self, bits: int, per: Granularity, dtype: torch.dtype) -> Quantizer:
        """Affine codes, or (16 bits) rows in the model's own ``dtype``."""
        return Plain(dtype) if bits == 16 else Affine(bits, per, self.group)
