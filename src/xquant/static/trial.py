"""A trial of what reads pages, as `kernels.trial` has one of what reads a cache that grows."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels.backend import Backend
from ..kernels.call import AttentionCall
from ..kernels.trial import BLOCKS, SEQUENCES, TAIL, Trial, random_states, remembered, tolerance
from ..methods import LayerCodec, Method
from ..serve.rotary import Angles
from ..store.packer import TORCH
from .layer import StaticLayer
from .places import Places, keeping_of


def failure(
    backend: Backend, codec: LayerCodec, method: Method, angles: Angles | None, trial: Trial
) -> str:
    """Why a backend that could read the pages of a layer is not to be taken for it; empty where it reads them
    as torch does, or reads none. The first failure on a device is a warning, too."""
    view = codec.view

    def compare() -> str:
        error = _error(backend, codec, method, angles)
        if error <= tolerance(view.dtype):
            return ""
        return f"{backend.name} reads pages that differ from the reference by {error:.2g}"

    return remembered(
        (backend.name, "pages", trial.layout(codec)),
        backend.name,
        compare,
        "pages are read",
        f"{method.spec}, heads of {view.head_size}, {view.dtype}",
        view.device,
    )


def tried_room(method: Method) -> int:
    """Tokens of a sequence in a trial."""
    return method.tail + BLOCKS * method.group + TAIL + 1


@torch.no_grad()
def _error(backend: Backend, codec: LayerCodec, method: Method, angles: Angles | None) -> float:
    """The error of attention in a decode step, relative (2-norm)."""
    view, room = codec.view, tried_room(method)
    layer = StaticLayer(codec, method, room, angles, backend, TORCH)
    if not layer.in_place:
        return 0.0
    random = torch.Generator(view.device).manual_seed(0)
    places = Places(SEQUENCES, room, keeping_of(method), view.device)
    layer.reserve(places, view.dtype)

    def states(count: int) -> tuple[Tensor, Tensor]:
        places.begin(torch.ones(SEQUENCES, count, dtype=torch.bool, device="cpu"))
        found = random_states(view, SEQUENCES, count, random)
        return found.key, found.value

    for count in (room - TAIL - 1, TAIL):
        layer.keep(*states(count))
        layer.settle()
        layer.hold()
        places.advance()
    key, value = states(1)
    shape = SEQUENCES, view.query_heads, 1, view.head_size
    query = torch.randn(shape, generator=random, dtype=view.dtype, device=view.device)
    scaling = view.head_size**-0.5
    keys, values = (each.double() for each in layer.whole(key, value))
    right = F.scaled_dot_product_attention(
        query.double(), keys, values, scale=scaling, enable_gqa=True
    ).transpose(1, 2)
    call = AttentionCall(query, key, value, None, scaling, None)
    found = layer.attend(call, places.sequences())
    return float((found.double() - right).norm() / right.norm())
