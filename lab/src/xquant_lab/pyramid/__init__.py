"""PyramidInfer, a baseline that drops tokens: its options. Its cache is in `cache`, which needs torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from xquant.calibration import Calibration
from xquant.methods import LayerCodec, Method, option, register
from xquant.models import AttentionView


@register
@dataclass(frozen=True, kw_only=True)
class Pyramid(Method):
    """PyramidInfer (arXiv 2405.12532): drops tokens that recent ones hardly attend to, more of them in upper
    layers.

    Stores K (after RoPE) and V of the kept tokens in the model's dtype. The newest ``tail`` tokens are kept
    whole. Of ``n`` older ones, layer ``l`` of ``L`` keeps ``n r``: those with the highest attention weight,
    averaged over all heads and the newest ``tail`` queries. ``r`` falls in a straight line from ``keep + s``
    in the lowest layer to ``keep - s`` in the highest, ``s = min(keep slope, 1 - keep)``. Bytes of a layer:
    ``2 G D b (tail + n r)``, with ``b`` the bytes of the dtype, and for each token 8 bytes more: which token
    it is, and its attention weight. Tokens are dropped ``group`` at a time, so up to ``group - 1`` more are
    there.

    Differs from the paper: a prompt's tokens are dropped once its forward pass is over, not on the way, so
    reading it costs as much as with the full cache. Three choices are ours: the straight line, weights in
    which all queries and heads count alike, and when tokens are dropped again.

    Examples:
        >>> from xquant_lab.pyramid import Pyramid
        >>> from xquant_lab.pyramid.cache import PyramidCache
        >>> cache = PyramidCache(model, Pyramid(keep=0.25, tail=32, group=32))
        >>> _ = model(**prompt, cache=cache)
        >>> report = cache.report()
        >>> report.tokens, report.cache_bytes < 0.4 * 2 * report.full_cache_bytes  # this model is in fp32
        (300, True)
    """

    name = "pyramid"
    paper = "PyramidInfer, arXiv 2405.12532"
    summary = "drops tokens that recent ones hardly attend to"
    example = "pyramid"
    not_causal = "drops tokens once later ones were seen"

    keep: float = option(0.5, "share of older tokens kept, mean of layers", most=1)
    slope: float = option(
        0.5, "by what part of keep the lowest layer keeps more, and the highest less", most=1
    )
    tail: int = option(64, "most recent tokens kept, whose attention decides", least=1)

    @property
    def causal(self) -> bool:
        return False

    def share(self, position: int, layers: int) -> float:
        """The share of older tokens that the layer at ``position``, counted from the lowest of ``layers``,
        keeps."""
        height = position / (layers - 1) if layers > 1 else 0.5
        return self.keep + min(self.keep * self.slope, 1 - self.keep) * (1 - 2 * height)

    def kept(self, tokens: int, share: float) -> int:
        """How many of ``tokens`` a layer with this share keeps."""
        older = max(tokens - self.tail, 0)
        return tokens - older + max(math.ceil(older * share), min(self.sink, older))

    def codecs(
        self, views: Sequence[AttentionView], calibration: Calibration | None = None
    ) -> list[LayerCodec]:
        """None: no layer is compressed.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"{self.spec} drops tokens, and caches of xquant keep all of them: the laboratory alone measures"
            " it, with a cache of its own (xquant_lab.pyramid.cache)"
        )
