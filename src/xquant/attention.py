"""The seam: hooks that show a cache what transformers does not pass to it, and the attention function
that lets it answer.

`attach` puts hooks on a model's decoder, input norms, key projections and attention layers, and
switches ``eager`` or ``sdpa`` to a registered attention function that asks the cache in use what to
attend to, then calls the model's own implementation. With any other cache in use, or none, both fall
through and the model computes what it always did. Other implementations (flash, flex) are left as
they are: `KVCache.update` then returns the whole keys and values.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from . import compat
from .calibrate import store
from .calibrate.artifact import Calibration, fingerprint
from .kernels.newest import Newest
from .methods import LayerCodec, Method, Seen
from .models import AttentionView, ModelView, view_model

_ATTACHMENT = "_xquant_attachment"
_SEAT = "_xquant_seat"
_PREFIX = "xquant_"
_WRAPPED = ("eager", "sdpa")


class ObservingCache:
    """What a cache offers to the seam."""

    attachment: "Attachment"

    @abstractmethod
    def begin(self, batch: int) -> None:
        """A forward pass of the decoder on ``batch`` sequences starts."""

    @abstractmethod
    def observe(
        self, view: AttentionView, x: Tensor, positions: Tensor | None, mask: Tensor | None
    ) -> None:
        """A compressed layer's attention is about to run on ``x`` ``[B, T, d]``."""

    @abstractmethod
    def answer(
        self, index: int, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, values and mask that layer ``index`` attends to, given the newest tokens' own."""

    def attend(self, index: int, newest: Newest) -> Tensor | None:
        """The attention of layer ``index`` itself, ``[B, T, H, D]``; None to have it done by the model's
        own implementation on what `answer` gives."""
        return None

    @abstractmethod
    def finish(self) -> None:
        """The forward pass has ended, also where it failed."""


class Seat:
    """What is known at one attention layer while it runs."""

    def __init__(self, attachment: "Attachment", view: AttentionView) -> None:
        self.attachment, self.view = attachment, view
        self.clear()

    def clear(self) -> None:
        self.x: Tensor | None = None
        self.residual: Tensor | None = None
        self.raw_key: Tensor | None = None
        self.open = False

    @property
    def fused(self) -> bool:
        """Whether our attention function will be called in this layer."""
        name: str = self.view.module.config._attn_implementation  # type: ignore[union-attr,assignment]
        return name.startswith(_PREFIX)

    def see_norm(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self.attachment.cache is not None and args:
            self.residual = args[0]

    def see_key(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if self.open:
            self.raw_key = output[..., self.view.key_slice]

    def see_attention(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        cache = self.attachment.cache
        if cache is None:
            return
        x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        self.x = x
        if self.residual is None:
            self.residual = x
        self.open = True
        cache.observe(self.view, x, kwargs.get("position_ids"), kwargs.get("attention_mask"))

    def seen(self, key: Tensor, value: Tensor) -> Seen:
        """All that was seen of the tokens whose ``key`` and ``value`` ``[B, G, T, D]`` a cache is given.

        Raises:
            ValueError: no forward pass of the model is at this layer.
        """
        x, residual, raw_key = self.x, self.residual, self.raw_key
        if x is None or residual is None or raw_key is None:
            raise ValueError(
                "keys and values alone cannot be stored: this cache is filled by forward passes of"
                f" the model it was made for ({type(self.attachment.view.model).__name__})"
            )
        self.x = None
        return Seen(x, residual, raw_key, key, value)


class Attachment:
    """The hooks on one model, and the codecs built for it."""

    def __init__(self, view: ModelView) -> None:
        self.view = view
        self.cache: ObservingCache | None = None
        self.seats: dict[int, Seat] = {}
        self._codecs: dict[tuple[Method, Calibration | None], list[LayerCodec]] = {}
        self._built_from: list[Any] = []
        self._fingerprint: str | None = None
        self._handles = [
            view.decoder.register_forward_pre_hook(self._begin, with_kwargs=True),
            view.decoder.register_forward_hook(self._end, always_call=True),
        ]
        self._configs: dict[int, tuple[Any, str]] = {}
        for layer in view.compressed:
            seat = self.seats[layer.index] = Seat(self, layer)
            setattr(layer.module, _SEAT, seat)
            if layer.norm is not None:
                self._handles.append(layer.norm.register_forward_pre_hook(seat.see_norm))
            self._handles.append(layer.key_module.register_forward_hook(seat.see_key))
            self._handles.append(
                layer.module.register_forward_pre_hook(seat.see_attention, with_kwargs=True)
            )
            config: Any = layer.module.config
            if config._attn_implementation in _WRAPPED:
                self._configs[id(config)] = (config, config._attn_implementation)
                config._attn_implementation = _PREFIX + config._attn_implementation

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        for config, name in self._configs.values():
            if config._attn_implementation == _PREFIX + name:
                config._attn_implementation = name
        for seat in self.seats.values():
            delattr(seat.view.module, _SEAT)

    def codecs(self, method: Method, calibration: Calibration | None = None) -> list[LayerCodec]:
        """The method's codecs for the compressed layers, kept until projections or key norms change.

        Raises:
            ValueError: a calibration that is missing, or made for another method or model; options
                that the model does not allow.
        """
        views = self.view.compressed
        state = [view.weights_state for view in views]
        if state != self._built_from:
            self._codecs.clear()
            self._fingerprint = None
            for view in views:
                view.forget_offline()
            self._built_from = state
        made = method, calibration
        if made not in self._codecs:
            if calibration is not None:
                calibration.check(method.calibrated_as, self._model_id())
            elif method.calibrates_itself:
                calibration = store.find(method.calibrated_as, self._model_id())
            if calibration is None and method.needs_calibration:
                raise ValueError(method.how_to_calibrate)
            with torch.no_grad():
                self._codecs[made] = method.codecs(views, calibration)
        return self._codecs[made]

    def _model_id(self) -> str:
        """The model's `fingerprint`, taken when a calibration first asks for it."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self.view.compressed)
        return self._fingerprint

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = [*args, *kwargs.values()]
        cache = next((a for a in inputs if isinstance(a, ObservingCache)), None)
        self.cache = None
        if cache is None:
            return
        if torch.compiler.is_compiling():
            raise ValueError("a compressed cache cannot be used in a compiled forward pass")
        if cache.attachment is not self:
            raise ValueError(
                "this cache was made for another model, or before detach: make a new one"
            )
        named = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
        cache.begin(next(t for t in (*named, *args) if isinstance(t, Tensor)).shape[0])
        self.cache = cache

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        cache, self.cache = self.cache, None
        for seat in self.seats.values():
            seat.clear()
        if cache is not None:
            cache.finish()


def attach(model: nn.Module) -> Attachment:
    """Prepare ``model`` for compressed caches; what `KVCache` calls first. Idempotent.

    Raises:
        TypeError, ValueError: see `view_model`.
    """
    attachment: Attachment | None = getattr(model, _ATTACHMENT, None)
    if attachment is None:
        attachment = Attachment(view_model(model))
        setattr(model, _ATTACHMENT, attachment)
    return attachment


def detach(model: nn.Module) -> None:
    """Take every hook off ``model`` and give it its attention implementation back.

    Caches made for it cannot be used afterwards. Does nothing where nothing is attached.
    """
    attachment: Attachment | None = getattr(model, _ATTACHMENT, None)
    if attachment is not None:
        attachment.detach()
        delattr(model, _ATTACHMENT)


def _unusual(options: dict[str, Any]) -> bool:
    """Whether the attention function is asked for more than scores, a mask and a softmax."""
    return bool(options.get("dropout") or options.get("output_attentions")) or any(
        options.get(name) is not None for name in ("s_aux", "position_bias", "head_mask")
    )


def _attention(like: str) -> Callable[..., Any]:
    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> Any:
        own = compat.attention_function(like, module)
        seat: Seat | None = getattr(module, _SEAT, None)
        if seat is not None and seat.open and seat.attachment.cache is not None:
            cache = seat.attachment.cache
            seat.clear()
            index = seat.view.index
            if not _unusual(kwargs):
                scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
                softcap = kwargs.get("softcap") if like == "eager" else None
                newest = Newest(query, key, value, attention_mask, scaling, softcap)
                out = cache.attend(index, newest)
                if out is not None:
                    return out, None
            key, value, attention_mask = cache.answer(index, key, value, attention_mask)
        return own(module, query, key, value, attention_mask, **kwargs)

    return attend


for _name in _WRAPPED:
    compat.register_attention(_PREFIX + _name, _name, _attention(_name))
