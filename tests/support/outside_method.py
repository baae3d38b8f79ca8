"""A method as somebody outside the package would write it: its options, its codec and its own format, in one
file that only uses what methods are made of."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from xquant.calibration import Expected
from xquant.calibrators.calibrator import Rows, Stage
from xquant.calibrators.find import make_calibrator
from xquant.methods import AttentionInputs, LayerCodec, Method
from xquant.methods.cost import NOTHING, RebuildCost
from xquant.models import AttentionView
from xquant.quant import Packed, Quantizer, Segment
from xquant.quant.quantizer import Field, dense

IN_A_BYTE = 5
"""Digits of base 3: 3**5 is 243."""


@dataclass(frozen=True, kw_only=True)
class Ternary(Method):
    """Keys after RoPE and values as numbers of a few ternary digits, with a scale per token or, found by a
    calibration, per channel."""

    name = "ternary"
    paper = "none"
    summary = "keys and values in ternary digits"
    example = "ternary-5"
    head_pattern = r"-(?P<digits>\d)"

    digits: int = field(metadata={"help": "ternary digits a number", "least": 1, "most": 5})
    group: int = field(default=16, metadata={"help": "tokens of a sealed block"})
    offline: bool = field(default=False, metadata={"help": "scales per channel, found offline"})

    @property
    def head(self) -> str:
        return f"{self.name}-{self.digits}"

    @property
    def needs_calibration(self) -> bool:
        return self.offline

    def expected_of(self, view: AttentionView) -> dict[str, Expected]:
        return {"reach": Expected((2, view.kv_width), torch.float32, least=0)} if self.offline else {}

    def codec(self, view: AttentionView, position: int, found: dict[str, Tensor]) -> LayerCodec:
        return TernaryCodec(view, self.digits, found.get("reach"))


class TernaryCodec(LayerCodec):
    """Rows are the keys of all heads, then their values."""

    rotated = keeps_states = True

    def __init__(self, view: AttentionView, digits: int, reach: Tensor | None) -> None:
        super().__init__(view)
        self.width = 2 * view.kv_width
        reaches = (None, None) if reach is None else reach
        self.segments = tuple(Segment(view.kv_width, Digits(digits, own)) for own in reaches)

    def features(self, inputs: AttentionInputs) -> Tensor:
        return torch.cat([t.transpose(1, 2).flatten(2) for t in (inputs.key, inputs.value)], -1)

    def rebuild(self, recalled: Tensor) -> tuple[Tensor, Tensor]:
        key, value = recalled.split(self.view.kv_width, -1)
        return key, value

    @property
    def rebuild_cost(self) -> RebuildCost | None:
        return NOTHING


@dataclass(frozen=True, eq=False)
class Digits(Quantizer):
    """Codes of ``digits`` digits, five digits in a byte whatever they belong to."""

    digits: int
    reach: Tensor | None = None

    @property
    def tables(self) -> list[Tensor]:
        return [] if self.reach is None else [self.reach]

    @property
    def channels(self) -> int | None:
        return None if self.reach is None else len(self.reach)

    @property
    def _steps(self) -> int:
        """From the middle level to the last."""
        return (3**self.digits - 1) // 2

    def encode(self, x: Tensor, excluded: Tensor | None) -> Packed:
        if torch.isnan(x).any():
            raise ValueError("NaN cannot be quantized")
        packed: Packed = {}
        scale = self._scale(x)
        if self.reach is None:
            packed["reach"] = x.float().abs().amax(-1).half()
            scale = self._scale(dense(packed, "reach").unsqueeze(-1))
        codes = (x / scale).round().clamp(-self._steps, self._steps).int() + self._steps
        places = 3 ** torch.arange(self.digits, device=x.device)
        digits = (codes.unsqueeze(2) // places.view(-1, 1) % 3).flatten(1, 2)
        short = -digits.shape[1] % IN_A_BYTE
        digits = torch.nn.functional.pad(digits, (0, 0, 0, short)).unflatten(1, (-1, IN_A_BYTE))
        weights = 3 ** torch.arange(IN_A_BYTE, device=x.device)
        packed["trits"] = (digits * weights.view(-1, 1)).sum(2).to(torch.uint8)
        return packed

    def decode(self, packed: Packed, out: Tensor) -> None:
        trits, tokens = dense(packed, "trits").int(), out.shape[1]
        weights = 3 ** torch.arange(IN_A_BYTE, device=out.device).view(-1, 1)
        digits = (trits.unsqueeze(2) // weights % 3).flatten(1, 2)[:, : tokens * self.digits]
        places = 3 ** torch.arange(self.digits, device=out.device).view(-1, 1)
        codes = (digits.unflatten(1, (tokens, -1)) * places).sum(2)
        reach = dense(packed, "reach").unsqueeze(-1) if self.reach is None else out
        out.copy_((codes - self._steps) * self._scale(reach))

    def _scale(self, reach: Tensor) -> Tensor:
        """Of a step, from how far a token (or, offline, a channel) reaches."""
        own = reach if self.reach is None else self.reach.to(reach.device)
        return own.float().clamp_min(1e-6) / self._steps

    def fields(self, tokens: int, channels: int) -> dict[str, Field]:
        found = {} if self.reach is not None else {"reach": Field((tokens,), torch.half, "ranges")}
        count = -(-tokens * self.digits // IN_A_BYTE)
        return {**found, "trits": Field((count, channels), torch.uint8, "codes")}


class TernaryCalibrator:
    """Finds the largest magnitude of every channel."""

    gradients = queries = False

    def __init__(self, method: Ternary, views: Sequence[AttentionView]) -> None:
        self.codecs = replace(method, offline=False).codecs(views)
        self.found = [torch.zeros(2, view.kv_width) for view in views]

    def stages(self, samples: int, length: int) -> Iterator[Stage]:
        yield self

    def see(self, position: int, rows: Rows) -> None:
        largest = torch.stack([rows.key.abs().amax(0), rows.value.abs().amax(0)])
        self.found[position] = torch.maximum(self.found[position], largest)

    def tensors(self) -> dict[str, Tensor]:
        return {f"{i}.reach": reach for i, reach in enumerate(self.found)}


make_calibrator.register(Ternary, TernaryCalibrator)
