from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..calibration import Expected
from ..models import AttentionView
from ..quant import Affine, Quantizer, hadamard
from .base import CALIBRATED_AT, OWN_TEXTS, SINK, TAIL, CodedMethod, Tensors, option
from .rotated import RotatedCodec, range_channels


def _clip(default: float, of: str) -> Any:
    text = f"share of a {of} head's magnitudes that are not clipped; 1 clips none"
    return option(default, text, least=0.5, most=1)


@dataclass(frozen=True, kw_only=True)
class Oscar(CodedMethod):
    """OSCAR (arXiv 2605.17757): heads rotated by a matrix that was found from the model's queries, clipped,
    then integers per token.

    Stores b-bit codes of keys after RoPE and of values, and an fp16 scale and zero for each head of a token,
    or for each equal part of at most 128 channels of a larger head: ``n (2 G D b) / 8 + 8 n G ceil(D / 128)``
    bytes in each layer for a block of n tokens. The first 64 tokens and the last 256 stay full.

    Differs from the paper: calibrated on text that the model writes. Every head has its own matrix;
    ``matrix="layer"`` gives the heads of a layer one, as its code does. As there, the weight of a token in
    the covariance of values is ``k^T C k`` with C that of its queries, and what share is clipped is set, not
    found. Scales are fp16, where its code has fp32. Recent tokens stay full until they fill a block. A head
    whose size is no power of two is rotated by a Hartley matrix as well.

    Examples:
        >>> from xquant import KVCache, Oscar, calibrate
        >>> text = tokenizer.decode(prompt.input_ids[0])
        >>> found = calibrate(model, tokenizer, "oscar-2bit", text, context=64, windows=4)
        >>> cache = KVCache(model, Oscar(bits=4, sink=4, tail=0), calibration=found)
        >>> cache.method.spec
        'oscar-4bit:sink=4,tail=0'
    """

    name = "oscar"
    paper = "OSCAR, arXiv 2605.17757"
    summary = "heads in a basis found from queries, clipped, uniform codes"
    example = "oscar-2bit"
    calibration_size = OWN_TEXTS
    calibrates_itself = True

    sink: int = option(64, SINK)
    tail: int = option(256, TAIL)
    key_clip: float = _clip(0.96, "key")
    value_clip: float = _clip(0.92, "value")
    matrix: str = option("head", "for each head, or for the heads of a layer", choices=("head", "layer"))

    @property
    def calibrated_as(self) -> str:
        return Oscar(bits=CALIBRATED_AT, matrix=self.matrix).spec

    def expected_of(self, view: AttentionView) -> dict[str, Expected]:
        count = (view.kv_heads,) if self.matrix == "head" else ()
        return {
            f"{name}.turn": Expected((*count, size, size), torch.float32, -1, 1)
            for name, size in (("key", view.head_size), ("value", view.value_size))
        }

    def codec(self, view: AttentionView, position: int, found: Tensors) -> "OscarCodec":
        keys, values = self.layer_widths(position)
        return OscarCodec(
            view,
            Affine(keys, "token", range_channels(view.head_size)),
            Affine(values, "token", range_channels(view.value_size)),
            (found["key.turn"], found["value.turn"]),
            (self.key_clip, self.value_clip),
            self.group,
        )


class OscarCodec(RotatedCodec):
    """Rotates heads, and clips what is far out of each.

    Args:
        rotations: of key heads and of value heads, see `spread`.
        shares: of the magnitudes of a rotated head that are not clipped, of keys and of values.
    """

    def __init__(
        self,
        view: AttentionView,
        keys: Quantizer,
        values: Quantizer,
        rotations: tuple[Tensor, Tensor],
        shares: tuple[float, float],
        block: int,
    ) -> None:
        super().__init__(view, keys, values, "post", rotations, block)
        self._shares = shares

    def rotate(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        key, value = self.view.by_head(super().rotate(key, value))
        of_keys, of_values = self._shares
        return clipped(key, of_keys).flatten(-2), clipped(value, of_values).flatten(-2)


def clipped(heads: Tensor, share: float) -> Tensor:
    """Heads ``[..., D]`` where no number is larger than the magnitude below which lie ``share`` of those of
    its head."""
    size = heads.shape[-1]
    place = min(int(share * size), size - 1)
    if place == size - 1:
        return heads
    most = heads.abs().sort(-1).values[..., place : place + 1]
    return heads.clamp(-most, most)


def spread(covariance: Tensor) -> Tensor:
    """The orthogonal matrix, fp32 ``[D, D]``, that heads of a ``covariance`` are multiplied with: its
    eigenvectors, then a Hadamard matrix, then channels in the bit-reversed order of the eigenvalues, the
    largest first."""
    values, vectors = torch.linalg.eigh((covariance + covariance.mT).double() / 2)
    mixed = vectors @ hadamard(len(values)).to(vectors)
    order = torch.empty_like(values, dtype=torch.long)
    order[bit_reversed(len(values)).to(order.device)] = values.argsort(descending=True)
    return mixed[:, order].T.float().clamp(-1, 1)


def bit_reversed(size: int) -> Tensor:
    """The numbers below ``size`` by their bits read backwards: ``[0, 4, 2, 6, 1, 5, 3, 7]`` for 8."""
    width = (size - 1).bit_length()
    return torch.tensor(sorted(range(size), key=lambda i: f"{i:0{width}b}"[::-1]), device="cpu")
