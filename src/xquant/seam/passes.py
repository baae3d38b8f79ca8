"""What is known during one forward pass, and what a cache offers to those that see it run."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn

from ..kernels.call import AttentionCall
from ..kernels.prompts import PromptAttention
from ..models import ModelView
from ..models.latent import Coded, Exact
from ..models.rotation import Pair
from .masks import PassMask
from .watched import Watched

PREFIX_TUNED = "peft's prefix tuning gives the model a cache with the prefix in it, in place of any other"
"""Of `compat.has_prefix`."""


def is_running(module: nn.Module) -> bool:
    """Whether a call of ``module`` is on the stack of this thread; one that was interrupted is not, though no
    hook tells of its end."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_locals.get("self") is module:
            return True
    return False


class LayerInputs(NamedTuple):
    """What an attention layer is given of ``T`` new tokens."""

    x: Tensor
    """Post-norm input ``[B, T, d]``."""
    positions: Tensor | None
    """``[B, T]`` or ``[1, T]``, integers."""
    mask: Tensor | None
    """Over all tokens, bool or added to scores, ``[B, 1, T, .]``."""
    rope: Pair | None
    """cos and sin, ``[B, T, R]`` each."""
    axes: Tensor | None = None
    """Positions of several axes, ``[N, B, T]``, where they are."""
    ids: Tensor | None = None
    """Of the tokens, ``[B, T]``; None where the model was given embeddings alone."""


class Attached(ABC):
    """What hangs on one model, as its passes, its layers and its caches know it: see `hooks`."""

    view: ModelView
    hooks: Mapping[int, Any]
    """`LayerHooks` of each compressed layer, by number."""

    @property
    @abstractmethod
    def current(self) -> "ForwardPass | None":
        """The forward pass that runs in this thread."""

    @abstractmethod
    def leaves_graphs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether hooks that no graph can hold are to run."""

    @abstractmethod
    def unserved(self, index: int) -> ValueError:
        """Layer ``index`` was given its newest states alone, and did something else with them."""


ATTACHMENT = "_xquant_attachment"
"""Of the attribute of a decoder that has what hangs on it."""


def attachment_of(decoder: nn.Module | None) -> Any:
    """What hangs on a decoder; None where nothing does."""
    return getattr(decoder, ATTACHMENT, None)


class ObservingCache:
    """What a cache offers to the seam."""

    attachment: Attached
    get_seq_length: Callable[..., int]
    """Tokens held."""
    layers: list[Any]
    """Those of compressed layers have a ``codec``."""
    traceable = False
    """Whether compiled forward passes may use it: see `traced`."""

    @property
    def prompts(self) -> PromptAttention | None:
        """What attends for prompts in place of the model, where it can."""
        return None

    @abstractmethod
    def begin(self, batch: int, length: int, mask: PassMask) -> Any:
        """A forward pass of the decoder starts, on ``length`` tokens of ``batch`` sequences. Returns what
        `restore` needs to undo it."""

    @abstractmethod
    def observe(self, given: LayerInputs) -> None:
        """The attention of the lowest compressed layer is about to run on what it was given."""

    @abstractmethod
    def answer(
        self, index: int, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, values and mask that layer ``index`` attends to, given the newest tokens' own."""

    @property
    def max_cache_len(self) -> int:
        """There is none, as in ``DynamicCache``. peft asks for it where it is about to replace the cache."""
        raise AttributeError(f"{type(self).__name__} has no max_cache_len, and {PREFIX_TUNED}")

    def see(self, index: int, call: AttentionCall) -> None:
        """Layer ``index`` is about to attend."""

    def attend(self, index: int, call: AttentionCall) -> Tensor | None:
        """The attention of layer ``index`` itself, ``[B, T, H, D]``; None to have it done by the model's
        own implementation on what `answer` gives."""
        return None

    def attend_in_place(self, index: int, call: AttentionCall, out: Tensor) -> None:
        """The same of a decode step that runs compiled: ``out`` ``[B, T, H, D]`` is written to."""
        raise NotImplementedError

    def latents(self, index: int, whole: bool = False) -> list[Exact | Coded]:
        """All latents of layer ``index`` as they are kept, in the order of tokens; ``whole``: as one part, in
        which they are there."""
        raise NotImplementedError

    def fixed_inputs(self, positions: bool) -> dict[str, Tensor]:
        """What a compiled decoder is given in place of its own inputs, so that all steps are alike.

        ``positions``: whether it was given none, int64 ``[1, t]``.
        """
        return {}

    def pass_over(self, batch: int, length: int) -> None:
        """The model ran without this cache, the last that it was given, on ``length`` tokens of ``batch``
        sequences."""

    @abstractmethod
    def finish(self, failed: bool = False) -> None:
        """The forward pass of the decoder has ended. Not called where it was interrupted."""

    def restore(self, state: Any) -> None:
        """What follows the decoder has failed: be as when it began."""


class LayerPass:
    """What was seen at one attention layer before its cache is updated."""

    def __init__(self) -> None:
        self.x: Tensor | None = None
        self.residual: Tensor | None = None
        self.raw_key: Tensor | None = None
        # The rest is noted while a layer is compiled.
        self.positions: Tensor | None = None
        self.rope: Pair | None = None
        self.key: Tensor | None = None
        self.value: Tensor | None = None
        self.mark: Tensor | None = None
        """Of a cache that attends in memory that stays where it is: what tells it from others."""


class Route(Enum):
    """What a cache returns to a layer in one pass, and who attends to it: see `route`."""

    NEWEST = "newest"
    """The newest states alone: our attention function asks the cache for the rest. A kernel attends to what
    is packed; where none does, the model's own implementation, to what the cache decodes."""
    LATENTS = "latents"
    """The newest latents alone: our attention function attends to all of them as they are (MLA)."""
    WHOLE = "whole"
    """Decoded keys and values of all tokens: the layer attends by itself."""


class ReturnedStates:
    """The states that a cache returned to a layer, which are to reach the attention function as they are."""

    def __init__(self, key: Tensor, value: Tensor, route: Route) -> None:
        self.key, self.value, self.route = key, value, route

    def reached(self, key: Tensor, value: Tensor) -> bool:
        """Whether these are the same tensors, and nothing was done with them."""
        if key is not self.key or value is not self.value:
            return False
        if isinstance(key, Watched) and isinstance(value, Watched):
            return not (key.touched or value.touched)
        return True


class PassStart:
    """What brings a cache back to the time before a model ran: the snapshot of its decoder's first pass."""

    def __init__(self, cache: ObservingCache) -> None:
        self._cache = ref(cache)
        self._begun: list[Any] = []

    def decoder_began(self, state: Any) -> None:
        self._begun.append(state)

    def end(self, failed: bool) -> None:
        cache = self._cache()
        if cache is None:
            return
        let_go(cache, PassStart)
        if failed and self._begun:
            cache.restore(self._begun[0])


_HELD: "WeakKeyDictionary[ObservingCache, dict[type, Any]]" = WeakKeyDictionary()


def hold(cache: ObservingCache, known: "ForwardPass | PassStart") -> "ref[Any]":
    """Have ``cache`` hold what is known of its pass, in place of what was; others hold this reference."""
    _HELD.setdefault(cache, {})[type(known)] = known
    return ref(known)


def let_go(cache: ObservingCache, kind: type) -> None:
    """Forget what `hold` was given of a ``kind``."""
    _HELD.get(cache, {}).pop(kind, None)


def nothing() -> None:
    """A reference to nothing."""


def split_axes(positions: Any, axes: int) -> tuple[Tensor | None, Tensor | None]:
    """Positions ``[B, T]`` and those of ``N`` axes ``[N, B, T]`` in what a model is given: either, or both in
    one ``[N + 1, B, T]``. Where a text goes on after an image, ``[1, B, T]`` are those of every axis."""
    if not isinstance(positions, Tensor) or positions.dim() not in (2, 3):
        return None, None
    if positions.dim() == 2:
        return positions, None
    if len(positions) == 1:
        return None, positions.expand(axes, -1, -1)
    if len(positions) not in (axes, axes + 1):  # something else, as the model knows
        return None, None
    return (positions[0] if len(positions) > axes else None), positions[-axes:]


class ForwardPass:
    """What one forward pass with a compressed cache knows, in its thread.

    The cache alone holds it (`hold`). So a pass that was interrupted, of which no hook tells, keeps nothing
    alive once its cache is gone.
    """

    def __init__(
        self,
        cache: ObservingCache,
        positions: tuple[Tensor | None, Tensor | None],
        ids: Tensor | None,
        compiled: bool = False,
    ) -> None:
        self._cache, self.ids = ref(cache), ids
        self.positions, self.axes = positions
        """As the decoder was given them, for layers that are given none."""
        self.compiled = compiled
        """Whether the decoder runs compiled."""
        self.inputs: dict[int, LayerPass] = {}
        self.returned: dict[int, ReturnedStates] = {}

    @property
    def cache(self) -> ObservingCache:
        cache = self._cache()
        assert cache is not None  # whoever runs the pass has it
        return cache

    def at(self, index: int) -> LayerPass:
        seen = self.inputs.get(index)
        if seen is None:
            seen = self.inputs[index] = LayerPass()
        return seen
