"""LayerCoder: whole blocks of one layer's keys and values as a method for storage packs them, and back.

Letters: ``m`` blocks of ``n`` tokens; ``G`` key/value heads of size ``D``; ``W = 2 G D``; ``S`` sinks of the
method.
"""

import torch
from torch import Tensor

from ..methods import LayerCodec, Method
from ..past.angles import Angles, RotatedStates
from ..past.packer import Packer
from ..past.pages import PageLayout, Pages


class LayerCoder:
    """Packs the blocks of a layer, and reads them.

    Args:
        codec: of the method, for this layer.
        method: its blocks have ``n`` tokens.
        angles: of the layer's rotary embedding; needed where the codec keeps keys before it.
        packer: what packs and unpacks blocks.
    """

    def __init__(self, codec: LayerCodec, method: Method, angles: Angles | None, packer: Packer) -> None:
        self.codec, self.block, self.sink = codec, method.group, method.sink
        self.layout, self._packer = PageLayout(codec.segments, method.group), packer
        self._rotated = RotatedStates(codec, angles)

    def pack(
        self, rows: Tensor, starts: Tensor, below: Tensor | None, embedded: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The bytes ``[m, .]`` of blocks ``rows`` ``[m, n, W]``, rotated keys beside values; and what the
        layer above is predicted from, ``[m, n, .]``.

        Args:
            starts: the positions that the blocks begin at, ``[m]``. One at 0 begins with the sinks.
            below: what this layer is predicted from, as the layer below has given it.
            embedded: what the method knows of the tokens by their ids, ``[1, m n, E]``.
        """
        features, hidden = self._rotated.features(rows, starts), self._sinks_of(starts)
        predicted = self._predicted(below, embedded)
        own = None if predicted is None else predicted.unflatten(1, features.shape[:2])
        encoded = self.codec.encode(features[None], own)[0]
        made = torch.zeros(len(rows), self.layout.nbytes, dtype=torch.uint8, device="cpu")
        numbers = torch.arange(len(rows), device="cpu")
        Pages(self.layout, made, self._packer).write(numbers, encoded, hidden)
        above = None
        if self.codec.feeds_above:
            recalled = self._recall(made, rows.dtype, predicted)
            above = self._above(recalled, below, features, hidden)
        return self.layout.compact(made), above

    def unpack(
        self, packed: Tensor, sinks: Tensor, starts: Tensor, below: Tensor | None, embedded: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The blocks that were packed, ``[m, n, W]``, and what the layer above is predicted from.

        Args:
            sinks: rotated keys beside values of the first tokens of each block, ``[m, S, W]``.
        """
        held, hidden = self.layout.spread(packed), self._sinks_of(starts)
        recalled = self._recall(held, sinks.dtype, self._predicted(below, embedded))
        states = (part.flatten(1) for part in self._rotated.states(recalled, starts))
        rows, exact = torch.cat([*states], -1).unflatten(0, (len(starts), self.block)), None
        if hidden is not None:
            exact = torch.nn.functional.pad(sinks, (0, 0, 0, self.block - self.sink))
            rows = torch.where(hidden[..., None], exact, rows)
        above = None
        if self.codec.feeds_above:
            features = None if exact is None else self._rotated.features(exact, starts)
            above = self._above(recalled, below, features, hidden)
        return rows, above

    def _predicted(self, below: Tensor | None, embedded: Tensor | None) -> Tensor | None:
        """What the codec predicts, ``[1, m n, W]``, from what the layer below has given of these blocks, and
        what is known of their tokens."""
        if embedded is not None:
            embedded = embedded.to(self.codec.view.dtype)
        return self.codec.predicted(None if below is None else below.flatten(0, 1)[None], embedded)

    def _recall(self, pages: Tensor, dtype: torch.dtype, predicted: Tensor | None) -> Tensor:
        """What the codec recalls of its pages, ``[1, m n, .]``."""
        numbers = torch.arange(len(pages), device="cpu")
        rows = Pages(self.layout, pages, self._packer).read(numbers, dtype)
        return self.codec.recall(rows.flatten(0, 1)[None], predicted, sealing=True)

    def _above(
        self, recalled: Tensor, below: Tensor | None, exact: Tensor | None, hidden: Tensor | None
    ) -> Tensor:
        """What the layer above is predicted from, ``[m, n, .]``. Of tokens that are ``hidden``, bool
        ``[m, n]``, it is what is ``exact``, ``[m, n, W]``."""
        own = self.codec.accumulate(recalled)[0].unflatten(0, (-1, self.block))
        if hidden is not None and exact is not None:
            own = torch.where(hidden[..., None], exact, own)
        return self.codec.accumulated_above(own, below)

    def _sinks_of(self, starts: Tensor) -> Tensor | None:
        """Which tokens are sinks, bool ``[m, n]``; None where none is."""
        hidden = (starts == 0)[:, None] & (torch.arange(self.block, device="cpu") < self.sink)
        return hidden if bool(hidden.any()) else None
