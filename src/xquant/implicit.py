"""Compressed caches for callers that pass none: `compress`, `decompress` and `compressed`.

``generate()`` makes a cache for each call that has none, by a method of the model. That method is replaced on
the one model, and a hook gives a cache to a forward pass that asks for one. So pipelines, chats and other
people's code need no change.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any

import torch
from torch import nn
from transformers import Cache, GenerationMixin

from .cache import KVCache
from .calibration import Calibration
from .compat import CACHE, has_prefix
from .methods import Method
from .seam.passes import PREFIX_TUNED

_NAME = "_prepare_cache_for_generation"
_KEPT = "_xquant_calls"
_OWN = (None, "dynamic")
"""What a call that asks for no kind of cache asks for."""


def compress(
    model: nn.Module,
    method: str | Method,
    attend: str = "chunk",
    calibration: Calibration | str | PathLike[str] | None = None,
    kernel: str = "auto",
    offload: str | None = None,
) -> None:
    """Give every call of ``model`` that passes no cache a compressed one of its own, until `decompress`.

    That is every ``model.generate(...)``, with all that calls it (pipelines, chats), and every
    ``model(..., use_cache=True)``. A call that passes ``past_key_values``, asks for another kind of cache
    (``cache_implementation="static"``) or for none is left alone, and so are engines with memory of their own
    (continuous batching) and, with a warning, ``generate`` of a model with prefix tuning (peft). A model that
    is compressed already is compressed anew.

    Args:
        model: a causal language model of transformers, or what holds one, such as a PEFT model.
        method, attend, calibration, kernel, offload: as of `KVCache`.

    Raises:
        ValueError, OSError, TypeError: as of `KVCache`, at once; the model is then as it was.

    Examples:
        >>> from xquant import compress, decompress
        >>> compress(model, "kivi-4bit")
        >>> out = model.generate(**inputs, max_new_tokens=4, return_dict_in_generate=True)
        >>> type(out.past_key_values).__name__
        'KVCache'
        >>> decompress(model)
    """
    calls = _Calls(model, method, attend, calibration, kernel, offload)
    calls.new_cache()  # what is refused is refused now
    decompress(model)
    calls.begin()


def decompress(model: nn.Module) -> None:
    """End what `compress` began. Does nothing where it did not.

    Examples:
        >>> from xquant import compress, decompress
        >>> compress(model, "int8")
        >>> decompress(model)
        >>> out = model.generate(**inputs, max_new_tokens=4, return_dict_in_generate=True)
        >>> type(out.past_key_values).__name__
        'DynamicCache'
    """
    calls = _calls_of(model)
    if calls is not None:
        calls.end()


@contextmanager
def compressed(
    model: nn.Module,
    method: str | Method,
    attend: str = "chunk",
    calibration: Calibration | str | PathLike[str] | None = None,
    kernel: str = "auto",
    offload: str | None = None,
) -> Iterator[None]:
    """`compress` for as long as a ``with`` block lasts; what was before it is so again after it.

    Arguments and errors are those of `compress`.

    Examples:
        >>> from xquant import compressed
        >>> with compressed(model, "kivi-4bit"):
        ...     out = model.generate(**inputs, max_new_tokens=4)
        >>> out.shape[1] - inputs.input_ids.shape[1]
        4
    """
    before = _calls_of(model)
    compress(model, method, attend, calibration, kernel, offload)
    try:
        yield
    finally:
        decompress(model)
        if before is not None:
            before.begin()


class _Calls:
    """Stands in for the method of one model that makes caches. It is copied and pickled with the model."""

    def __init__(
        self,
        model: nn.Module,
        method: str | Method,
        attend: str,
        calibration: Calibration | str | PathLike[str] | None,
        kernel: str,
        offload: str | None,
    ) -> None:
        if isinstance(calibration, str | PathLike):
            calibration = Calibration.load(calibration)
        self._model = _generating(model)
        self._options = (method, attend, calibration, kernel, offload)
        self._handle: Any = None

    def new_cache(self) -> KVCache:
        return KVCache(self._model, *self._options)

    def begin(self) -> None:
        setattr(self._model, _KEPT, self)
        setattr(self._model, _NAME, self.prepare)
        self._handle = self._model.register_forward_pre_hook(self.see_call, with_kwargs=True)

    def end(self) -> None:
        self._handle.remove()
        delattr(self._model, _NAME)
        delattr(self._model, _KEPT)

    def prepare(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """In place of the method of transformers that puts a cache into ``model_kwargs``."""
        wanted = generation_config.cache_implementation in _OWN and generation_config.use_cache
        if wanted and has_prefix(self._model):
            wanted = False
            warnings.warn(f"this call is not compressed: {PREFIX_TUNED}", stacklevel=2)
        if wanted and model_kwargs.get(CACHE) is None:
            model_kwargs[CACHE] = cache = self.new_cache()
            if generation_config.is_assistant:
                cache.activate_past_recording()
            return None
        own = getattr(type(self._model), _NAME)
        return own(self._model, generation_config, model_kwargs, *args, **kwargs)

    @torch.compiler.disable
    def see_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        given = (*args, *kwargs.values())
        asked = kwargs.get("use_cache") and not module.training
        if not asked or any(isinstance(each, Cache) for each in given):
            return None
        return args, {**kwargs, CACHE: self.new_cache()}


def _generating(model: nn.Module) -> Any:
    """The model itself, or the one inside that generates text.

    Raises:
        TypeError: there is none.
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    found = next((module for module in modules if isinstance(module, GenerationMixin)), None)
    if found is None:
        raise TypeError(f"a transformers model is needed, not {type(model).__name__}")
    return found


def _calls_of(model: nn.Module) -> _Calls | None:
    found: _Calls | None = getattr(_generating(model), _KEPT, None)
    return found
