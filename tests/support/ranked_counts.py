"""Counts of ranked codes by their bits."""

from xquant.quant.trellis import WIDTHS


def counts_of(channels: dict[float, int]) -> tuple[int, ...]:
    """The counts of `Ranked` that gives so many channels codes of so many bits a number."""
    assert channels.keys() <= {width.bits for width in WIDTHS}
    return tuple(channels.get(width.bits, 0) for width in WIDTHS)
