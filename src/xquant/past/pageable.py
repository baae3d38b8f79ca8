"""Which codecs have pages: blocks of one layer, all of one size, packed of keys and values alone."""

from collections.abc import Sequence

from ..methods import LayerCodec, Method
from ..methods.xquant import LatentCodec
from .latents import LatentsOfStates

PAGE_TOKENS = 32
"""Tokens of a page are a multiple of this: the engine's own kernels want it too."""


def of_states(codecs: Sequence[LayerCodec]) -> list[LayerCodec]:
    """The same codecs, with keys and values for features where those are latents of `xquant`.

    Raises:
        ValueError: latents cannot be had of keys and values.
    """
    return [LatentsOfStates(c) if isinstance(c, LatentCodec) else c for c in codecs]


def unfit(codecs: Sequence[LayerCodec], stored: bool = False) -> str:
    """Why an engine cannot serve these layers, or store their blocks; empty where it can."""
    if not stored and any(codec.reads_below or codec.feeds_above for codec in codecs):
        return (
            "layers that are predicted from those below do not fit a batch of sequences; the method is for"
            " caches at rest (docs/at-rest.md)"
        )
    reasons = (_unfit_layer(codec) for codec in codecs)
    return next(filter(None, reasons), "")


def unfit_options(method: Method) -> str:
    """Why blocks of a method cannot be pages; empty where they can."""
    if method.group % PAGE_TOKENS:
        return f"a page holds a multiple of {PAGE_TOKENS} tokens, not {method.group}"
    if method.sink > method.group:
        return f"{method.sink} sinks are more than the {method.group} tokens of a page"
    return ""


def _unfit_layer(codec: LayerCodec) -> str:
    if not codec.keeps_states:
        return "it keeps layer inputs, which an engine does not give to a cache"
    if codec.coded_together:
        return "its layers are coded together, and a page holds those of one layer"
    if any(segment.shared for segment in codec.segments):
        return "layers share codes, and a page holds those of one layer"
    return ""
