"""What can be served, and why the rest cannot: asked before an engine loads a model."""

from collections.abc import Sequence
from typing import Any

import torch

from ..analysis.shapes import Skeleton
from ..methods import LayerCodec, Method
from ..spec import parse_method

PAGE_TOKENS = 32
"""Tokens of a page are a multiple of this: the engine's own kernels want it too."""


def parse(spec: Any) -> Method:
    """The method that an engine is asked for.

    Raises:
        ValueError: it is none, or cannot be served; the message says why.
    """
    if not isinstance(spec, str):
        raise ValueError(f"xquant: the method is a spec string, not {type(spec).__name__}")
    try:
        method = parse_method(spec)
    except ValueError as error:
        raise ValueError(f"xquant: {error}") from None
    if why := _unfit_options(method):
        raise _refused(method, why)
    return method


def check_model(method: Method, config: Any, dtype: torch.dtype, shards: int = 1) -> None:
    """Ask for the codecs of a model that is not loaded.

    Args:
        config: of transformers.
        dtype: of its keys and values.
        shards: that its heads are divided among.

    Raises:
        ValueError: the model or the method for it cannot be served; the message says why.
    """
    try:
        view = Skeleton(config, dtype).view
        if view.skipped:
            index, why = next(iter(view.skipped.items()))
            raise ValueError(f"layer {index}: {why}")
        codecs = method.codecs(view.compressed)
    except ValueError as error:
        raise _refused(method, str(error)) from None
    if why := unfit(codecs, method, shards):
        raise _refused(method, why)


def unfit(codecs: Sequence[LayerCodec], method: Method, shards: int = 1) -> str:
    """Why an engine cannot serve these layers; empty where it can."""
    if any(codec.reads_below or codec.feeds_above for codec in codecs):
        return (
            "layers that are predicted from those below do not fit a batch of sequences; the method is for"
            " caches at rest (docs/at-rest.md)"
        )
    reasons = (_unfit_layer(codec, method, shards) for codec in codecs)
    return next(filter(None, reasons), "")


def _unfit_options(method: Method) -> str:
    if method.group % PAGE_TOKENS:
        return f"a page holds a multiple of {PAGE_TOKENS} tokens, not {method.group}"
    if method.sink:
        return "pages have no room for sinks kept in full"
    if method.tail:
        return "a ring has no room for recent tokens beside those of the newest block"
    if method.needs_calibration:
        return "methods with a calibration are not served yet"
    return ""


def _unfit_layer(codec: LayerCodec, method: Method, shards: int) -> str:
    if codec.kept is not None:
        return "it drops tokens, and pages keep all of them"
    if not codec.keeps_states:
        return "it keeps layer inputs, which an engine does not give to a cache"
    if any(segment.shared for segment in codec.segments):
        return "layers share codes, and a page holds those of one layer"
    if any(segment.quantizer.sparse for segment in codec.segments):
        return "outliers make blocks differ in size, and pages are all of one"
    ranges = sum(segment.parts(method.group)["ranges"] for segment in codec.segments)
    if shards > 1 and ranges:
        return "tensor parallelism would cut ranges of tokens within heads"
    return ""


def _refused(method: Method, why: str) -> ValueError:
    return ValueError(f"xquant: {method.spec} cannot be served: {why}")
