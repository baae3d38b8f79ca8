"""The angles of an engine's rotary embedding, by which keys are turned back before they are packed."""

from torch import Tensor

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
        self._blocks: dict[int, tuple[Within, Pair]] = {}

    def turn(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Keys ``[T, G, D]`` at ``positions`` ``[T]``, rotated."""
        return rotate(keys[None], *self._at(positions, keys))[0]

    def turn_back(self, keys: Tensor, positions: Tensor) -> Tensor:
        """The inverse of `turn`."""
        return unrotate(keys[None], *self._at(positions, keys))[0]

    def of_blocks(self, block: int) -> tuple[Within, Pair]:
        """As kernels take them: the angles within a block, and of the positions that blocks start at,
        ``[columns, R / 2]``."""
        if block not in self._blocks:
            factor = self._cos[0, 0]  # some embeddings scale what they rotate: the start has that
            within = Within((self._cos[:block] / factor, self._sin[:block] / factor))
            starts = self._cos[::block].contiguous(), self._sin[::block].contiguous()
            self._blocks[block] = within, starts
        return self._blocks[block]

    def _at(self, positions: Tensor, like: Tensor) -> Pair:
        cos, sin = (t[positions].to(like.dtype).repeat(1, 2)[None] for t in (self._cos, self._sin))
        return cos, sin
