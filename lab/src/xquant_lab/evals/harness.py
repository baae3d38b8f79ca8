"""The model type ``xquant`` of lm-evaluation-harness: a model of transformers with a compressed cache.

    xquant lm-eval --model xquant --model_args pretrained=MODEL,method=SPEC --tasks gsm8k_cot

Importing this module registers it. Then ``lm_eval.simple_evaluate(model="xquant", ...)`` knows it too.

Tasks that generate work as ``generate()`` does: the tokens of a prompt attend to each other exactly, and
new tokens read the store. Log-likelihoods, rolling ones too, are computed as perplexity is: in one forward
pass, in which every token reads all tokens, itself included, from the store. Methods whose codes come from
a layer above cannot do that. They read their text a block at a time, and each block attends to earlier ones
through the store.
"""

from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils_hf import get_dtype
from torch import Tensor

from xquant.cache.growing import KVCache
from xquant.calibration import Calibration
from xquant.compat import CACHE
from xquant.hub import PACKAGED
from xquant.load import load_model
from xquant.methods import Method
from xquant.seam.masks import PassMask
from xquant.spec import parse_method

from ..pyramid import Pyramid
from ..pyramid.cache import AnyCache, PyramidCache, cache_of
from .agreement import Comparison
from .reading import logits_of


@register_model("xquant")
class XQuantLM(HFLM):
    """lm-eval's model type ``hf`` with caches of ``method``. With ``full`` its results are those of ``hf``,
    bit for bit.

    Args:
        pretrained: a folder, a hub id, ``smollm2``, ``smollm2-mha``, or a loaded model, which needs a
            ``tokenizer`` too.
        method: a method or its spec.
        calibration: what `xquant.calibrate` found, or its file; for the methods that need one.
        dtype: of the weights; ``auto`` is that of the model's files.
        device: where to put the model; by default the GPU where there is one.
        more: all other arguments of ``hf``.

    Of prompts that are longer than ``longest`` tokens the end is read, and answers end after ``most`` tokens.
    With a ``comparison``, which takes prompts one at a time, a prompt's last tokens read the earlier ones
    from the store, like a question about a text that was read before.

    Raises:
        ValueError: unknown method, a calibration that is missing or made for something else, or a model
            that cannot be served; raised before the first request.
    """

    def __init__(
        self,
        pretrained: Any,
        method: str | Method = "full",
        calibration: Calibration | str | PathLike[str] | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | None = None,
        **more: Any,
    ) -> None:
        self.method = parse_method(method)
        self.longest: int | None = None
        self.most: int | None = None
        self.comparison: Comparison | None = None
        self.calibration = (
            Calibration.load(calibration) if isinstance(calibration, str | PathLike) else calibration
        )
        device = device or "cuda"
        if device.startswith("cuda") and not torch.cuda.is_available():
            device = "cpu"  # lm-eval's command asks for a GPU by default, also where there is none
        if isinstance(pretrained, str) and pretrained in PACKAGED:
            weights = torch.float32 if dtype == "auto" else get_dtype(dtype)
            pretrained, more["tokenizer"] = load_model(pretrained, weights, device)
        super().__init__(pretrained, dtype=dtype, device=device, **more)
        cache_of(self.model, self.method, self.calibration)

    def tok_batch_encode(self, strings: Sequence[str], *places: Any, **named: Any) -> tuple[Tensor, Tensor]:
        """Token ids and attention mask of prompts, each ``[B, T]``."""
        ids, mask = super().tok_batch_encode(strings, *places, **named)
        start = -(self.longest or 0)
        return ids[:, start:], mask[:, start:]

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation: Any) -> Tensor:
        """Token ids of prompts ``context`` ``[B, T]``, padded on the left, and their continuations."""
        if self.most is not None:
            max_length = min(max_length, context.shape[1] + self.most)

        def generate(cache: AnyCache) -> Tensor:
            tokens: Tensor = super(XQuantLM, self)._model_generate(
                context, max_length, stop, **{CACHE: cache}, **generation
            )
            return tokens

        if self.comparison is not None:
            with self._precision():
                return self.comparison.answer(self.method, context, generate)
        return generate(cache_of(self.model, self.method, self.calibration))

    def _model_call(self, inps: Tensor, **unused: Any) -> Tensor:
        """Logits ``[B, T, V]`` of texts ``inps`` ``[B, T]``, padded on the right."""
        causal = self.method.causal
        cache: AnyCache
        if isinstance(self.method, Pyramid):  # no token of a text is dropped for padding after it
            cache = PyramidCache(self.model, self.method)
        else:
            attend = "store" if causal else "chunk"
            cache = _RightPadded(inps, self.model, self.method, attend, self.calibration)
        with torch.no_grad(), self._precision():
            return logits_of(self.model, cache, inps, None if causal else self.method.group)

    def _precision(self) -> torch.autocast:
        """As lm-eval calls a model."""
        enabled = self.mixed_precision_dtype is not None
        return torch.autocast(self.device.type, self.mixed_precision_dtype, enabled)


class _RightPadded(KVCache):
    """A cache that knows which of ``ids`` ``[B, T]`` are padding, without an attention mask.

    lm-eval pads texts on the right with zeros and gives the model no mask: no earlier token attends to
    them. With a mask, other attention kernels would run than in its type ``hf``. But padding must not set
    ranges of quantization, so the cache is told. A text may end in a token 0 of its own. That is taken for
    padding, and its key and value are clamped to the ranges of the others.
    """

    def __init__(self, ids: Tensor, *more: Any) -> None:
        super().__init__(*more)
        self._text = ids.flip(1).cumsum(1).flip(1) > 0
        self._text[:, 0] = True

    def begin(self, batch: int, length: int, mask: PassMask) -> None:
        stop = self.get_seq_length() + length
        super().begin(batch, length, replace(mask, tokens=self._text[:, :stop]))
