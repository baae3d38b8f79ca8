"""The bytes of a `PyramidCache`, computed without making it."""

from xquant.analysis.memory import INDEX_NBYTES, CacheBytes, CacheLayout
from xquant.analysis.shapes import Skeleton
from xquant.methods import Full, Method

from . import Pyramid

KEPT_NBYTES = 8
"""Bytes of a kept token's column and weight, beside its keys and values."""


class PyramidLayout(CacheLayout):
    """What ``method`` stores of a model. Its keys and values are those of the full cache, of fewer tokens."""

    def __init__(self, skeleton: Skeleton, method: Pyramid) -> None:
        super().__init__(skeleton, Full(group=method.group))
        self.method = self.pyramid = method

    def count(self, context: int, batch: int) -> CacheBytes:
        return self._count(context, batch)

    def peak(self, context: int, batch: int) -> int:
        return self._count(context, batch, more=self.pyramid.group - 1).total

    def _count(self, context: int, batch: int, more: int = 0) -> CacheBytes:
        """The bytes after tokens were dropped, ``more`` of which are still there."""
        tail = 0
        for position, codec in enumerate(self.codecs):
            share = self.pyramid.share(position, len(self.codecs))
            kept = min(self.pyramid.kept(context, share) + more, context)
            tail += kept * (codec.width * codec.view.dtype.itemsize + KEPT_NBYTES)
        skipped = self.skeleton.skipped_nbytes(context)
        sizes = (batch * nbytes for nbytes in (tail, INDEX_NBYTES * context, skipped))
        return CacheBytes(0, 0, 0, 0, 0, *sizes)


def layout_of(skeleton: Skeleton, method: Method) -> CacheLayout:
    """The bytes of any method."""
    if isinstance(method, Pyramid):
        return PyramidLayout(skeleton, method)
    return CacheLayout(skeleton, method)
