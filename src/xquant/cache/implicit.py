"""Compressed caches for callers that pass none: `compress`, `decompress` and `compressed`.

``generate()`` makes a cache for each call that has none, by a method of the model. That method is replaced on
the one model, and a hook gives a cache to a forward pass that asks for one. So pipelines, chats and other
people's code need no change. Both are taken off when nothing asks for compressed caches any more.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from os import PathLike
from threading import RLock
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationMixin

from ..calibration import Calibration
from ..compat import CACHE, depth_of, has_prefix
from ..contents.options import CacheOptions
from ..methods import Method
from ..operators import operator
from ..seam.passes import PREFIX_TUNED
from ..seam.traced import in_one_graph, refused
from .growing import KVCache

_NAME = "_prepare_cache_for_generation"
_KEPT = "_xquant_calls"
_CHANGING = RLock()
_OWN = (None, "dynamic")
"""What a call that asks for no kind of cache asks for."""


def compress(
    model: nn.Module,
    method: str | Method,
    attend: str = "chunk",
    calibration: Calibration | str | PathLike[str] | None = None,
    kernel: str = "auto",
    offload: str | None = None,
    budget: int | str | None = None,
) -> None:
    """Give every call of ``model`` that passes no cache a compressed one of its own, until `decompress`.

    That is every ``model.generate(...)``, with all that calls it (pipelines, chats), and every
    ``model(..., use_cache=True)``. A call that passes a cache, asks for another kind of cache
    (``cache_implementation="static"``) or for none is left alone, and so are engines with memory of their own
    (continuous batching) and, with a warning, ``generate`` of a model with prefix tuning (peft). A model that
    is compressed already is compressed anew. It holds in every thread; within a block of `compressed` the
    block's method comes first. The other arguments are those of `KVCache`.

    Args:
        model: a causal language model of transformers, or what holds one, such as a PEFT model.

    Raises:
        ValueError, OSError, TypeError: as of `KVCache`, at once; the model is then as it was.

    Examples:
        >>> from xquant import compress, decompress
        >>> compress(model, "kivi-4bit")
        >>> out = model.generate(**inputs, max_new_tokens=4, return_dict_in_generate=True)
        >>> type(out.cache).__name__
        'KVCache'
        >>> decompress(model)
    """
    options = _checked(model, method, attend, calibration, kernel, offload, budget)
    with _CHANGING:
        _calls_of(model, made=True).lasting = options


def decompress(model: nn.Module) -> None:
    """End what `compress` began. Does nothing where it did not, and ends no block of `compressed`.

    Examples:
        >>> from xquant import compress, decompress
        >>> compress(model, "int8")
        >>> decompress(model)
        >>> out = model.generate(**inputs, max_new_tokens=4, return_dict_in_generate=True)
        >>> type(out.cache).__name__
        'DynamicCache'
    """
    with _CHANGING:
        calls = _calls_of(model)
        if calls is not None:
            calls.lasting = None
            calls.end_if_idle()


@contextmanager
def compressed(
    model: nn.Module,
    method: str | Method,
    attend: str = "chunk",
    calibration: Calibration | str | PathLike[str] | None = None,
    kernel: str = "auto",
    offload: str | None = None,
    budget: int | str | None = None,
) -> Iterator[None]:
    """`compress` for as long as a ``with`` block lasts, in the context that opened the block.

    A context is what `contextvars` calls one: a thread, or a task of asyncio with those that it starts. So
    blocks of several threads, tasks or generators may overlap, and each ends itself alone. The newest block
    that is open comes first. A thread that is started within a block has a context of its own and is not in
    the block, unless it runs in a copy of the context: ``Thread(target=copy_context().run, args=(f,))``.

    Arguments and errors are those of `compress`.

    Examples:
        >>> from xquant import compressed
        >>> with compressed(model, "kivi-4bit"):
        ...     out = model.generate(**inputs, max_new_tokens=4)
        >>> out.shape[1] - inputs.input_ids.shape[1]
        4
    """
    options = _checked(model, method, attend, calibration, kernel, offload, budget)
    with _CHANGING:
        calls = _calls_of(model, made=True)
        calls.blocks.append(options)
    try:
        _BLOCKS.set((*_BLOCKS.get(), options))
        yield
    finally:
        _BLOCKS.set(tuple(each for each in _BLOCKS.get() if each is not options))
        with _CHANGING:
            calls.blocks.remove(options)
            calls.end_if_idle()


def _checked(model: nn.Module, *given: Any) -> CacheOptions:
    """Options that caches of a model can be made with: what is refused is refused now."""
    options = CacheOptions.of(*given)
    KVCache(_generating(model), *options.arguments)
    return options


_BLOCKS: ContextVar[tuple[CacheOptions, ...]] = ContextVar("xquant_compressed", default=())
"""Of the blocks that this context has opened, of any model; the newest last."""


class _Calls:
    """Stands in for the method of one model that makes caches. It is copied and pickled with the model."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._depth = depth_of(model)
        self.lasting: CacheOptions | None = None
        """Of `compress`."""
        self.blocks: list[CacheOptions] = []
        """That are open, in any context."""
        setattr(model, _KEPT, self)
        setattr(model, _NAME, self.prepare)
        self._handle = model.register_forward_pre_hook(self.see_call, with_kwargs=True)

    def __getstate__(self) -> dict[str, Any]:
        """Without blocks: those of the model are not open for its copies."""
        return {**self.__dict__, "blocks": []}

    def end_if_idle(self) -> None:
        """Leave the model as it was, where nothing asks for compressed caches any more."""
        if self.lasting is None and not self.blocks:
            self._handle.remove()
            delattr(self._model, _NAME)
            delattr(self._model, _KEPT)

    @property
    def current(self) -> CacheOptions | None:
        """What holds in this context."""
        opened = (each for each in reversed(_BLOCKS.get()) if each in self.blocks)
        return next(opened, self.lasting)

    def prepare(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """In place of the method of transformers that puts a cache into ``model_kwargs``."""
        wanted = generation_config.cache_implementation in _OWN and generation_config.use_cache
        # In an early exit a model drafts by its lower layers: generate() sets how many those are.
        whole = depth_of(self._model) == self._depth
        current = self.current
        if current is not None and wanted and has_prefix(self._model):
            wanted = False
            warnings.warn(f"this call is not compressed: {PREFIX_TUNED}", stacklevel=2)
        if current is not None and wanted and whole and model_kwargs.get(CACHE) is None:
            model_kwargs[CACHE] = cache = KVCache(self._model, *current.arguments)
            if generation_config.is_assistant:
                cache.activate_past_recording()
            return None
        own = getattr(type(self._model), _NAME)
        return own(self._model, generation_config, model_kwargs, *args, **kwargs)

    def see_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        given = (*args, *kwargs.values())
        asked = kwargs.get("use_cache") and not module.training
        if not asked or any(isinstance(each, Cache) for each in given):
            return None
        if torch.compiler.is_dynamo_compiling() and in_one_graph():
            return _first_checked(args, kwargs, _place(self))
        return args, {**kwargs, **self._cache_of_a_call()}

    @torch.compiler.disable
    def _cache_of_a_call(self) -> dict[str, Any]:
        current = self.current
        return {} if current is None else {CACHE: KVCache(self._model, *current.arguments)}


_COMPILED: WeakValueDictionary[int, _Calls] = WeakValueDictionary()
"""Those that a graph was made of which may not be left, by their ids."""


@torch.compiler.assume_constant_result
def _place(calls: _Calls) -> int:
    _COMPILED[id(calls)] = calls
    return id(calls)


def _first_checked(args: Any, kwargs: dict[str, Any], place: int) -> tuple[Any, dict[str, Any]]:
    """The same arguments, the first tensor by way of an operator that refuses calls which are compressed."""
    args, names = list(args), [name for name, each in kwargs.items() if isinstance(each, Tensor)]
    if args and isinstance(args[0], Tensor):
        args[0] = _unless_compressed(args[0], place)
    elif names:
        kwargs = {**kwargs, names[0]: _unless_compressed(kwargs[names[0]], place)}
    return tuple(args), kwargs


def _same(x: Tensor, place: int) -> Tensor:
    calls = _COMPILED.get(place)
    if calls is not None and calls.current is not None:
        raise refused("with fullgraph=True no cache can be made before it")
    return x.clone()


_unless_compressed = operator(
    "unless_compressed", "(Tensor x, int place) -> Tensor", _same, lambda x, _: torch.empty_like(x)
)


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


def _calls_of(model: nn.Module, made: bool = False) -> Any:
    """The `_Calls` of a model; where it has none they are ``made``, or None."""
    generating = _generating(model)
    found = getattr(generating, _KEPT, None)
    return _Calls(generating) if found is None and made else found
