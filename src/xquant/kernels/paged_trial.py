"""A trial of what reads pages, as `kernels.trial` has one of what reads a cache that grows."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..methods import LayerCodec, Method
from ..models.rope import Rope
from ..past.angles import Angles
from ..past.batch_layout import BatchLayout
from ..past.packer import TORCH
from ..past.sequences import MOST_QUERIES
from ..past.static_layer import StaticLayer
from ..past.step import Retention
from .backend import Backend
from .call import AttentionCall
from .trial import BLOCKS, SEQUENCES, TAIL, Trial, random_states


def tried_room(method: Method) -> int:
    """Tokens of a sequence in a trial."""
    return method.tail + BLOCKS * method.group + TAIL + 1


class PagesTrial(Trial):
    """Compares what reads the pages of a layer with torch.

    Args:
        angles: of the rotary embedding, for codecs that keep keys before it.
    """

    form = "pages are read"

    def __init__(
        self, codecs: Sequence[LayerCodec], method: Method, rope: Rope, angles: Angles | None
    ) -> None:
        super().__init__(codecs, method, rope)
        self._angles = angles

    @torch.no_grad()
    def error(self, backend: Backend, codec: LayerCodec) -> float:
        """Of attention in a decode step, relative (2-norm); 0 where the backend reads no such pages."""
        view, room = codec.view, tried_room(self.method)
        angles = None if codec.rotated else self._angles
        layer = StaticLayer(codec, self.method, room, angles, backend, TORCH)
        if not layer.in_place:
            return 0.0
        random = torch.Generator(view.device).manual_seed(0)
        layout = BatchLayout(SEQUENCES, room, Retention.of(self.method, MOST_QUERIES), view.device)
        layer.reserve(layout, view.dtype)

        def states(count: int) -> tuple[Tensor, Tensor]:
            layout.begin(torch.ones(SEQUENCES, count, dtype=torch.bool, device="cpu"))
            found = random_states(view, SEQUENCES, count, random)
            return found.key, found.value

        for count in (room - TAIL - 1, TAIL):
            layer.append(*states(count))
            layer.settle()
            layer.fill_rings()
            layout.advance()
        key, value = states(1)
        shape = SEQUENCES, view.query_heads, 1, view.head_size
        query = torch.randn(shape, generator=random, dtype=view.dtype, device=view.device)
        scaling = view.head_size**-0.5
        keys, values = (each.double() for each in layer.whole(key, value))
        right = F.scaled_dot_product_attention(
            query.double(), keys, values, scale=scaling, enable_gqa=True
        ).transpose(1, 2)
        call = AttentionCall(query, key, value, None, scaling, None)
        found = layer.attend_newest(call, layout.sequences())
        return float((found.double() - right).norm() / right.norm())
