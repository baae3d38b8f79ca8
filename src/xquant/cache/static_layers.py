"""The layers of a `StaticKVCache`, and why a method or a model has none."""

from collections.abc import Sequence

from .. import compat
from ..kernels.choose import Choice, choose, packer_of, warn_of_torch
from ..kernels.trial import PagesTrial, tried_room
from ..methods import LayerCodec, Method
from ..models import ModelView
from ..past.angles import Angles
from ..past.pageable import of_states, unfit, unfit_options
from ..past.static_layer import StaticLayer


def check_method(method: Method) -> None:
    """Refuse a method whose blocks cannot be pages.

    Raises:
        ValueError: it is one.
    """
    if why := unfit_options(method):
        raise _refused(method, why)


def layers_of(
    view: ModelView, method: Method, made: Sequence[LayerCodec], room: int, kernel: str
) -> tuple[list[StaticLayer], list[Choice]]:
    """The layers of a model, empty, and what attends over each.

    Args:
        made: the codecs of the method for it.
        room: tokens of a sequence.
        kernel: as `KVCache` takes it.

    Raises:
        ValueError: the model or the method cannot be served in this way, or the kernel cannot be used.
    """
    codecs = _codecs(view, method, made)
    angles = None if all(codec.rotated for codec in codecs) else _angles(view, method, room)
    trial = PagesTrial(codecs, method, view.rope, angles)
    layers, choices = [], []
    for codec in codecs:
        choice = choose(codec, method.group, kernel, trial=trial)
        packer = packer_of(kernel, codec.view.device)
        own = None if codec.rotated else angles
        layer = StaticLayer(codec, method, room, own, choice.backend, packer)
        layers.append(layer)
        choices.append(choice if layer.in_place else _whole(choice))
    return layers, choices


def _codecs(view: ModelView, method: Method, made: Sequence[LayerCodec]) -> list[LayerCodec]:
    for index, why in view.skipped.items():
        raise _refused(method, f"layer {index} has {why}")
    for index, layer in enumerate(compat.default_layers(compat.text_config(view.model))):
        if compat.has_state(layer):
            raise _refused(method, f"layer {index} has a state beside keys and values")
    if not view.rope.width:
        raise _refused(method, "the model has no rotary embedding")
    if any(layer.latents or layer.value_size != layer.head_size for layer in view.compressed):
        raise _refused(method, "the model keeps latents (MLA), or values of another size than keys")
    try:
        codecs = of_states(made)
    except ValueError as error:
        raise _refused(method, str(error)) from None
    if any(getattr(codec.view.module, "sinks", None) is not None for codec in codecs):
        raise _refused(method, "its attention has sinks that are learned")
    if why := unfit(codecs):
        raise _refused(method, why)
    return codecs


def _angles(view: ModelView, method: Method, room: int) -> Angles:
    # Blocks are whole, and so is the last, of which a part has room.
    most = max(room, tried_room(method)) + method.group
    try:
        return Angles.of(view.rope, most, view.compressed[0].device)
    except ValueError as error:
        raise _refused(method, str(error)) from None


def _whole(choice: Choice) -> Choice:
    """A backend that reads no pages: steps decode the whole past."""
    if not (why := choice.why):
        why = "the kernel reads no pages of such layers"
        warn_of_torch(why)
    return Choice(choice.backend, f"decodes the whole past: {why}")


def _refused(method: Method, why: str) -> ValueError:
    return ValueError(f"{method.spec} has no static cache: {why}; use KVCache")
