"""What blocks must take by the formulas of their quantizers."""

from xquant.past.stream import Stream


def block_nbytes(stream: Stream) -> int:
    """Bytes of one block of a stream, without its outliers."""
    return sum(segment.parts(stream.block).total() for segment in stream.segments)
