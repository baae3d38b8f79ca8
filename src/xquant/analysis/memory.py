"""The bytes of a cache, computed without making it, as `KVCache.report` counts them.

The method builds its codecs for a model without weights, and their quantizers say what they store.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch

from .. import __version__
from ..calibration import Calibration
from ..methods import Method
from ..models import AttentionView
from ..quant.quantizer import OUTLIER_NBYTES, Part
from .shapes import Skeleton

INDEX_NBYTES = 10
"""Bytes of a token in the index: its position, its id, and whether it is padding or a sink."""
ENTRY_NBYTES = 8
"""Bytes of a block in a layer's table."""
SINK_NBYTES = 4
"""Bytes of a sink's position, beside its row."""


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of a cache by what they are.

    ``codes`` counts rows that 16 bits keep as they are, too; ``ranges`` scales and zeros; ``outliers`` their
    counts, channels and residuals; ``tables`` codebooks and offline ranges; ``index`` positions and block
    tables; ``skipped`` the layers that are not compressed, and states beside those that are.
    """

    codes: int
    ranges: int
    outliers: int
    tables: int
    sinks: int
    tail: int
    index: int
    skipped: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


class CacheLayout:
    """What ``method`` stores of every token, block and sequence of a model.

    Raises:
        ValueError: options that the model does not allow.
    """

    def __init__(self, skeleton: Skeleton, method: Method) -> None:
        self.skeleton, self.method = skeleton, method
        views = skeleton.view.compressed
        with torch.device("meta"):
            self.codecs = method.codecs(views, _calibration(method, views))
        segments = [segment for codec in self.codecs for segment in codec.segments]
        self.block: Counter[Part] = Counter()
        for segment in segments:
            self.block.update(segment.parts(method.group))
        self.row_nbytes = sum(codec.tail_width * codec.view.dtype.itemsize for codec in self.codecs)
        self.sink_row_nbytes = sum(
            codec.width * (codec.sink_dtype or codec.view.dtype).itemsize for codec in self.codecs
        )
        self.table_nbytes = sum(segment.quantizer.table_nbytes for segment in segments)
        self._sparse = [segment for segment in segments if segment.quantizer.sparse]

    @property
    def estimated(self) -> bool:
        """Whether bytes depend on the text, where the number of outliers is then an expectation, or on the
        calibration."""
        return bool(self._sparse) or self.method.sized_by_calibration

    @property
    def codec_nbytes(self) -> int:
        """Bytes of the weights that the method adds to the model's own."""
        return sum(codec.nbytes for codec in self.codecs)

    @property
    def code_bits(self) -> float:
        """Bits of codes for every key and value element of a block."""
        values = self.method.group * sum(codec.view.state_width for codec in self.codecs)
        return 8 * self.block["codes"] / values

    @property
    def rebuilds(self) -> bool:
        """Whether keys and values are computed from other states, or nothing says that they are not."""
        costs = [codec.rebuild_cost for codec in self.codecs]
        return any(cost is None or bool(cost.matrices) for cost in costs)

    def count(self, context: int, batch: int) -> CacheBytes:
        """The bytes after ``batch`` sequences of ``context`` tokens without padding."""
        blocks = max((context - self.method.tail) // self.method.group, 0)
        tail = context - blocks * self.method.group
        layers = len(self.codecs)
        of_sink = self.sink_row_nbytes + SINK_NBYTES * layers
        sinks = self.method.sink * of_sink if blocks else 0
        outliers = blocks * self.block["outliers"] + OUTLIER_NBYTES * self._outliers(blocks)
        return CacheBytes(
            codes=batch * blocks * self.block["codes"],
            ranges=batch * blocks * self.block["ranges"],
            outliers=batch * outliers,
            tables=self.table_nbytes if blocks else 0,
            sinks=batch * sinks,
            tail=batch * tail * self.row_nbytes,
            index=batch * (INDEX_NBYTES * context + ENTRY_NBYTES * blocks * layers),
            skipped=batch * self.skeleton.skipped_nbytes(context),
        )

    def peak(self, context: int, batch: int) -> int:
        """The most bytes held on the way to ``context`` tokens.

        Sealing makes a cache smaller, so this may be just before the last block was sealed.
        """
        fullest = context - (context - self.method.tail + 1) % self.method.group
        return max(self.count(t, batch).total for t in (context, max(fullest, 0)))

    def full_nbytes(self, context: int, batch: int) -> int:
        """Bytes of the fp16 cache of the same tokens."""
        values = context * sum(codec.view.state_width for codec in self.codecs)
        return 2 * batch * (values + self.skeleton.skipped_values(context))

    def _outliers(self, blocks: int) -> int:
        """Outliers to be expected of one sequence; sinks have none."""
        tokens = blocks * self.method.group
        seen = max(tokens - self.method.sink, 0)
        every = (s.expected_outliers(blocks, self.method.group, seen) for s in self._sparse)
        return round(sum(every))


def layouts_of(
    skeleton: Skeleton, methods: Iterable[Method]
) -> tuple[list[CacheLayout], dict[str, list[str]]]:
    """The layouts of the methods that a model allows; and the specs of the others, by the reason."""
    layouts: list[CacheLayout] = []
    refused: dict[str, list[str]] = defaultdict(list)
    for method in methods:
        try:
            layouts.append(CacheLayout(skeleton, method))
        except ValueError as reason:
            refused[str(reason)].append(method.spec)
    return layouts, refused


def _calibration(method: Method, views: list[AttentionView]) -> Calibration | None:
    """A calibration without numbers: levels are 0 and a spectrum is flat."""
    if not method.needs_calibration:
        return None
    tensors = {name: wanted.blank() for name, wanted in method.expected(views).items()}
    return Calibration(tensors, method.calibrated_as, model="none", text="none", version=__version__)
