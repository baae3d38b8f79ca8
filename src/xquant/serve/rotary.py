"""The angles of an engine's rotary embedding, by which keys are turned back before they are packed."""

from torch import Tensor

from ..models.base import rotate, unrotate


class Angles:
    """cos and sin of every position that a model allows.

    Args:
        cos, sin: ``[positions, R / 2]``, as the engine turns keys by.
    """

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self._cos, self._sin = cos, sin

    def turn(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Keys ``[T, G, D]`` at ``positions`` ``[T]``, rotated."""
        return rotate(keys[None], *self._at(positions, keys))[0]

    def turn_back(self, keys: Tensor, positions: Tensor) -> Tensor:
        """The inverse of `turn`."""
        return unrotate(keys[None], *self._at(positions, keys))[0]

    def _at(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = (t[positions].to(like.dtype).repeat(1, 2)[None] for t in (self._cos, self._sin))
        return cos, sin
