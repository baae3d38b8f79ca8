"""The angles of an engine's rotary embedding, by which keys are turned back before they are packed."""

from torch import Tensor

from ..kernels.paged import PagedAngles
from ..kernels.rope import Within
from ..models.base import rotate, unrotate
from ..models.rope import Pair


class Angles:
    """cos and sin of every position that a model allows.

    Args:
        cos, sin: fp32 ``[positions, R / 2]``; keys are turned by them in the dtype of the model.
    """

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self._cos, self._sin = cos.float(), sin.float()
        self._blocks: dict[int, PagedAngles] = {}

    def turn(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Keys ``[T, G, D]`` at ``positions`` ``[T]``, rotated."""
        return rotate(keys[None], *self._at(positions, keys))[0]

    def turn_back(self, keys: Tensor, positions: Tensor) -> Tensor:
        """The inverse of `turn`."""
        return unrotate(keys[None], *self._at(positions, keys))[0]

    def paged(self, block: int) -> PagedAngles:
        """As kernels take them that read pages of ``block`` tokens."""
        if block not in self._blocks:
            factor = self._cos[0, 0]  # some embeddings scale what they rotate: the start has that
            within = Within((self._cos[:block] / factor, self._sin[:block] / factor))
            starts = self._cos[::block].contiguous(), self._sin[::block].contiguous()
            self._blocks[block] = PagedAngles(within, starts, (self._cos, self._sin))
        return self._blocks[block]

    def _at(self, positions: Tensor, like: Tensor) -> Pair:
        cos, sin = (t[positions].to(like.dtype).repeat(1, 2)[None] for t in (self._cos, self._sin))
        return cos, sin
