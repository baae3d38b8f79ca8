from collections.abc import Sequence
from dataclasses import dataclass

from ..calibration import Calibration
from ..catalogue import short
from ..models import AttentionView
from .base import BITS, GROUP, ROPE, TAIL, Method, option
from .codec import LayerCodec
from .key_value import KeyValueCodec


@dataclass(frozen=True, kw_only=True)
class AsymKV(Method):
    """AsymKV (arXiv 2410.13212): 2 bits for the first l_k key and l_v value layers, 1 bit above.

    Stores what `kivi` stores, with bits of their own for the keys and the values of each layer. Where an
    average is asked for, keys get more bits before values do: at 1.5 bits all keys have 2 bits, all values 1.

    Differs from the paper: keys are stored before RoPE by default, and recent tokens stay in the model's
    dtype as in `kivi`.

    Examples:
        >>> from xquant import AsymKV
        >>> method = AsymKV(average=1.5)
        >>> method.spec
        'asymkv-1.5bit'
        >>> method.wide_layers(32)  # how many of 32 layers have 2-bit keys, and 2-bit values
        (32, 0)
    """

    name = "asymkv"
    paper = "AsymKV, arXiv 2410.13212"
    summary = "as kivi, 2 bits in the lower layers and 1 bit above"
    example = "asymkv-1.5bit"
    head_pattern = r"(-(?P<average>[\d.]+)bit)?"

    tail: int = option(128, TAIL)
    group: int = option(32, GROUP)
    average: float | None = option(None, "average bits of K and V")
    lk: int | None = option(None, "how many of the lowest layers have keys of high bits")
    lv: int | None = option(None, "how many of the lowest layers have values of high bits")
    high: int = option(2, "bits of the lower layers", choices=BITS)
    low: int = option(1, "bits of the layers above", choices=BITS)
    rope: str = option("pre", **ROPE)

    def __post_init__(self) -> None:
        super().__post_init__()
        by_layer = self.lk is not None and self.lv is not None
        half = (self.lk is None) != (self.lv is None)
        if half or by_layer == (self.average is not None):
            raise ValueError(
                "asymkv: give either the average bits (asymkv-1.5bit) or both lk and lv (asymkv:lk=16,lv=0)"
            )
        if self.average is not None and not self.low <= self.average <= self.high:
            raise ValueError(
                f"asymkv: an average of {self.average:g} bits is not between {self.low} and {self.high}"
            )

    @property
    def head(self) -> str:
        return self.name if self.average is None else f"{self.name}-{short(self.average)}bit"

    def wide_layers(self, layers: int) -> tuple[int, int]:
        """l_k and l_v for a model of ``layers`` layers.

        Raises:
            ValueError: more than there are layers.
        """
        if self.lk is None or self.lv is None:
            assert self.average is not None
            steps = self.high - self.low
            wide = round((self.average - self.low) / steps * 2 * layers) if steps else 0
            return min(wide, layers), max(wide - layers, 0)
        for name, count in (("lk", self.lk), ("lv", self.lv)):
            if count > layers:
                raise ValueError(f"asymkv: {name}={count} but {layers} layers are compressed in this model")
        return self.lk, self.lv

    def codecs(
        self, views: Sequence[AttentionView], calibration: Calibration | None = None
    ) -> list[LayerCodec]:
        lk, lv = self.wide_layers(len(views))
        return [
            KeyValueCodec(
                view,
                self.quantizer(self.high if i < lk else self.low, "channel", view.dtype),
                self.quantizer(self.high if i < lv else self.low, "token", view.dtype),
                self.rope,
            )
            for i, view in enumerate(views)
        ]
