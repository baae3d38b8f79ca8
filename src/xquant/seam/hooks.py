"""The seam: hooks that show a cache what transformers does not pass to it, and the attention function
that lets it answer.

`attach` puts hooks on a model, its decoder, input norms, key projections and attention layers, and has
layers whose attention is ``eager`` or ``sdpa`` call a registered attention function: it asks the cache in
use what to attend to, then calls the model's own implementation. Layers find its name in a `LayerConfig`;
the model's configuration stays as it is, for others who read it. With any other cache in use, or none,
hooks and function fall through and the model computes what it always did. Other implementations (flash,
flex) are left as they are: `KVCache.update` then returns the whole keys and values.

What is known during a forward pass belongs to the pass, and a pass to its thread: threads may run one model
with a cache each. In the order in which a forward pass meets them:

1. `Attachment.model_begins` and `decoder_begins`: `cache.begin`.
2. In each compressed layer, `LayerHooks.see_norm`, `see_attention` (in the lowest, `cache.observe`) and
   `see_key`; then the layer calls ``cache.update``, which takes `Attachment.inputs` and gives back
   `Attachment.return_states`.
3. The function of `attention.py`: `cache.attend`, or the model's implementation on `cache.answer`.
4. `Attachment.decoder_ends` (`cache.finish`) and `model_ends`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock, local
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from .. import compat
from ..codecs import Codecs
from ..identity import Identity
from ..methods import AttentionInputs
from ..models import ModelView, find_decoder, view_model
from . import attention
from .compiled_steps import steps_of
from .inputs import between, cache_among, ids_among, replaced, tokens_among
from .layer import NAME, LayerHooks
from .masks import PassMask, mask_among
from .naming import name_functions
from .passes import (
    ATTACHMENT,
    PREFIX_TUNED,
    Attached,
    ForwardPass,
    ObservingCache,
    PassStart,
    ReturnedStates,
    Route,
    attachment_of,
    hold,
    let_go,
    nothing,
    split_axes,
)
from .traced import RUNNING, UNSEEN, checked, in_one_graph, outside_graphs, refused, why_uncompiled
from .watched import Watched, watch

_ATTACHING = RLock()

attention.register()


def attach(model: nn.Module) -> "Attachment":
    """Prepare ``model`` for compressed caches. `KVCache` does this first; calling it again changes nothing.

    Raises:
        TypeError: ``model`` is not a transformers model.
        ValueError: the model cannot be served; the message names it and the reason.

    Examples:
        >>> from xquant import attach, detach
        >>> [layer.index for layer in attach(model).view.compressed]
        [0, 1, 2, 3, 4]
        >>> detach(model)
    """
    model = compat.uncompiled(model)
    if compat.has_prefix(model):
        raise ValueError(f"{PREFIX_TUNED}: pass none")
    with _ATTACHING:
        attachment: Attachment | None = attachment_of(find_decoder(model))
        if attachment is not None and attachment.view.outdated:
            attachment.detach()
            attachment = None
        if attachment is None:
            attachment = Attachment(view_model(model))
        attachment.check_depth()
        attachment.watch(model)
        attachment.asked += 1
        return attachment


@contextmanager
def attached(model: nn.Module) -> Iterator["Attachment"]:
    """`attach`, undone where the block fails: a model that had no hooks before has none after."""
    attachment = attach(model)
    try:
        yield attachment
    except BaseException:
        with _ATTACHING:
            attachment.asked -= 1
            here = attachment_of(attachment.view.decoder) is attachment
            if here and not attachment.asked:
                attachment.detach()
        raise


def detach(model: nn.Module) -> None:
    """Take every hook off ``model`` and give it its attention implementation back.

    Caches made for it cannot be used afterwards. Does nothing if nothing is attached.

    Examples:
        >>> from xquant import KVCache, detach
        >>> cache = KVCache(model, "kivi-4bit")
        >>> detach(model)
        >>> _ = model(**inputs)  # as if there had been no cache
    """
    model = compat.uncompiled(model)
    with _ATTACHING:
        attachment: Attachment | None = attachment_of(find_decoder(model))
        if attachment is not None:
            attachment.detach()


class Attachment(Attached):
    """The hooks on one model, and the codecs built for it."""

    def __init__(self, view: ModelView) -> None:
        self.view = view
        self._depth = compat.depth_of(view.model)
        self.codecs = Codecs(view.compressed)
        self.identity = Identity(view)
        self.hooks = {layer.index: LayerHooks(self, layer) for layer in view.compressed}
        self.asked = 0
        """How many calls of `attach` have taken it, less those that `attached` has undone."""
        self._names = name_functions(self.hooks.values(), view.model.config)
        self._local = local()
        self._handles: list[Any] = []
        self._see(view.decoder, self.decoder_begins, self.decoder_ends)
        setattr(view.decoder, ATTACHMENT, self)
        for hooks in self.hooks.values():
            layer = hooks.view
            setattr(layer.module, NAME, hooks)
            if layer.norm is not None:
                self._handles.append(layer.norm.register_forward_pre_hook(hooks.see_norm))
            self._handles.append(layer.key_module.register_forward_hook(hooks.see_key))
            self._handles.append(
                layer.module.register_forward_pre_hook(hooks.see_attention, with_kwargs=True)
            )

    def watch(self, model: nn.Module) -> None:
        """See the calls of a model that has the decoder in it: what follows the decoder may fail, too."""
        seen = self.model_begins in model._forward_pre_hooks.values()
        if model is self.view.decoder or seen:
            return
        self._see(model, self.model_begins, self.model_ends)
        self._handles += [
            each.register_forward_pre_hook(self.outer_begins, with_kwargs=True)
            for each in between(model, self.view.decoder)
        ]

    def _see(self, module: nn.Module, begins: Any, ends: Any) -> None:
        """Have hooks called before and after ``module`` runs, whether or not it fails."""
        self._handles += [
            module.register_forward_pre_hook(begins, with_kwargs=True),
            module.register_forward_hook(ends, with_kwargs=True, always_call=True),
        ]

    def check_depth(self) -> None:
        """Refuse a model that is told to run fewer layers than it had.

        Raises:
            ValueError: it is.
        """
        depth = compat.depth_of(self.view.model)
        if depth != self._depth:
            raise ValueError(
                f"{type(self.view.model).__name__} had {self._depth} layers when its first cache was made,"
                f" and runs {depth} now: set config.num_hidden_layers back, or detach(model)"
            )

    def see_implementation(self) -> None:
        """Know by what layers attend now: another implementation may have been set since."""
        for name in self._names:
            name.follow()

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        for name in self._names:
            name.give_back()
        for hooks in self.hooks.values():
            delattr(hooks.view.module, NAME)
        delattr(self.view.decoder, ATTACHMENT)

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to a thread: models with hooks are copied, pickled and saved."""
        return {name: value for name, value in self.__dict__.items() if name != "_local"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _local=local())

    @property
    def current(self) -> ForwardPass | None:
        """The forward pass that runs in this thread."""
        found: ForwardPass | None = getattr(self._local, "current", nothing)()
        return found

    # -- a forward pass begins -------------------------------------------------------------

    def leaves_graphs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether hooks that no graph can hold are to run. A compiled pass without a cache of ours stays one
        graph. Where a graph may not be left they cannot run, and operators of `traced` refuse the pass."""
        if not torch.compiler.is_dynamo_compiling():
            return True
        ours = cache_among(args, kwargs) is not None
        return (ours or self.view.rope.switches) and not in_one_graph()

    @outside_graphs
    def model_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = cache_among(args, kwargs)
        mine = cache is not None and cache.attachment is self
        if mine and compat.has_prefix(module):
            raise ValueError(f"{PREFIX_TUNED}: pass none")
        self._local.outer = None
        self.outer_begins(module, args, kwargs)
        self._local.start = nothing
        if mine and cache is not None:
            self._local.start = hold(cache, PassStart(cache))

    @outside_graphs
    def outer_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module with the decoder in it may be given what it does not pass on: ids where the decoder is
        given embeddings, and a mask over tokens where it is given one of who sees whom."""
        ids, mask = getattr(self._local, "outer", None) or (None, None)
        own, given = ids_among(args, kwargs), mask_among(module, args, kwargs)
        self._local.outer = ids if own is None else own, mask if given is None else given

    def decoder_begins(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self.leaves_graphs(args, kwargs):
            return None
        return args, kwargs | self._begin(module, args, kwargs, torch.compiler.is_dynamo_compiling())

    @torch.compiler.disable
    def _begin(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], compiled: bool
    ) -> dict[str, Any]:
        """Have the cache begin. Returns what the decoder is given in place of its own inputs."""
        cache = cache_among(args, kwargs)
        self._local.current = nothing
        outer, self._local.outer = getattr(self._local, "outer", None) or (None, None), None
        inputs = tokens_among(args, kwargs)
        last = getattr(self._local, "last", nothing)()
        if cache is None or inputs is None:
            if last is not None and inputs is not None:
                last.pass_over(*inputs.shape[:2])
            return {}
        if cache.attachment is not self:
            raise ValueError("this cache was made for another model, or before detach: make a new one")
        if module.training and getattr(module, "gradient_checkpointing", False):
            raise ValueError(
                "with gradient checkpointing a model uses no cache: call model.eval() or"
                " model.gradient_checkpointing_disable() first"
            )
        self.see_implementation()
        if compiled:
            self._check_compiled(module, args, kwargs, cache)
        else:
            steps = steps_of(module)
            asked = steps is not None and steps.takes(args, kwargs)
            compiled = asked and not why_uncompiled(self.hooks, module, cache)
        batch, length = inputs.shape[:2]
        given = mask_among(module, args, kwargs)
        mask = PassMask.of(given, outer[1], batch, cache.get_seq_length() + length)
        begun = cache.begin(batch, length, mask)
        start: PassStart | None = getattr(self._local, "start", nothing)()
        if start is not None:
            start.decoder_began(begun)
        ids = ids_among(args, kwargs)
        ids = outer[0] if ids is None else ids
        if ids is not None and ids.shape != (batch, length):
            ids = None
        positions = split_axes(kwargs.get("position_ids"), self.view.rope.axes)
        current = ForwardPass(cache, positions, ids, compiled)
        self._local.current = hold(cache, current)
        self._local.last = ref(cache)
        RUNNING.attachment = ref(self)
        if not compiled or len(args) > 1:
            return {}
        return {**cache.fixed_inputs(positions=kwargs.get("position_ids") is None)}

    def _check_compiled(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cache: ObservingCache,
    ) -> None:
        """Refuse what cannot run compiled. Compiled layers cannot be watched, so what they do with the states
        that a cache returns is seen in a pass before, with a copy of the cache.

        Raises:
            ValueError: for a reason of `why_uncompiled`.
        """
        why = why_uncompiled(self.hooks, module, cache)
        if why == UNSEEN:
            with torch.no_grad():
                module(*replaced(args, cache), **replaced(kwargs, cache))
            why = why_uncompiled(self.hooks, module, cache)
        if why:
            raise refused(why)

    # -- a cache asks at a layer ---------------------------------------------------------------

    def inputs(self, index: int, key: Tensor, value: Tensor) -> AttentionInputs:
        """What is known of the tokens whose ``key`` and ``value`` ``[B, G, T, D]`` layer ``index`` gives
        to its cache.

        Raises:
            ValueError: no forward pass of the model is at this layer.
        """
        current = self.current
        inputs = None if current is None else current.inputs.pop(index, None)
        if inputs is None or inputs.x is None or inputs.residual is None or inputs.raw_key is None:
            raise ValueError(
                "keys and values alone cannot be stored: this cache is filled by forward passes of"
                f" the model it was made for ({type(self.view.model).__name__})"
            )
        key = self.hooks[index].view.as_in_cache(key)
        return AttentionInputs(inputs.x, inputs.residual, inputs.raw_key, key, value)

    def trace(
        self, index: int, key: Tensor, value: Tensor, mark: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """What a cache returns to layer ``index`` while it is compiled: the states as they are. ``mark``: see
        `LayerPass`. A layer that may attend by itself is refused as it runs: the cache would not see it."""
        hooks = self.hooks[index]
        key, tracing = checked(hooks, key), hooks.tracing()
        tracing.key, tracing.value, tracing.mark = key, value, mark
        return key, value

    def return_states(self, index: int, key: Tensor, value: Tensor, route: Route) -> tuple[Tensor, Tensor]:
        """What a cache returns to layer ``index``, to be seen again by the attention function. States are
        watched on their way until it is known whether they reach it; a warning says where they do not."""
        current, hooks = self.current, self.hooks[index]
        assert current is not None
        passes_on = hooks.passes_on
        if route is Route.WHOLE and passes_on is False:
            hooks.warn_of_whole(current.cache.layers[index].codec)
            return key, value
        if passes_on is None:
            key, value = watch(key), watch(value)
        current.returned[index] = ReturnedStates(key, value, route)
        return key, value

    # -- the forward pass ends -----------------------------------------------------------------

    @outside_graphs
    def decoder_ends(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        current, self._local.current = self.current, nothing
        if current is None:
            return
        let_go(current.cache, ForwardPass)
        lost, failed = None, output is None
        for index, returned in () if failed else current.returned.items():
            if isinstance(returned.key, Watched):
                self.hooks[index].learn(False)
            if returned.route is not Route.WHOLE:
                lost = index
        current.cache.finish(failed or lost is not None)
        if lost is not None:
            raise self.unserved(lost)

    @outside_graphs
    def model_ends(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        start: PassStart | None = getattr(self._local, "start", nothing)()
        self._local.start = nothing
        if start is not None:
            start.end(failed=output is None)

    def unserved(self, index: int) -> ValueError:
        """Layer ``index`` was given its newest states alone, and did something else with them."""
        return ValueError(
            f"{type(self.view.model).__name__} is not supported in this way: layer {index} works with the"
            " keys and values that its cache returns before it attends to them"
        )
