"""Which layers' keys and values are worth a bit more, and which can do with one less, by measuring each.

The divergence from the full cache is measured with the keys of one layer at the method's bits and all else at
the most that there are; so for its values, and for every layer. An error of a quantizer is a quarter with
each bit more. So bits move from where they cost least to where they gain most, one for one, and all take as
many bytes as before. What was measured one by one need not add up: all moves, the first half of them, a
quarter and so on are measured together, and the best is taken.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor

from xquant.calibration import Calibration
from xquant.methods.base import LayeredMethod
from xquant.methods.widths import Widths
from xquant.models import AttentionView
from xquant.seam.hooks import attach

from .journal import Journal
from .perplexity import PerplexityRow, measure

Place = tuple[int, str]
"""A layer, counted from the bottom, and what has bits there: ``keys``, ``values``, or ``both`` where a method
keeps one tensor for them."""


def worthwhile(
    divergences: Mapping[Place, float], sizes: Mapping[Place, int], allows: Callable[[Place, int], bool]
) -> list[tuple[Place, Place]]:
    """Where a bit is given to and where it is taken from, the most worthwhile first.

    Args:
        divergences: of a place alone.
        sizes: numbers of a token at a place. Bits move between places of one size.
        allows: whether a place may have so many bits more.
    """
    more: Counter[Place] = Counter()

    def left(place: Place, by: int = 0) -> float:
        return divergences[place] * 4.0 ** -(more[place] + by)

    moves: list[tuple[Place, Place]] = []
    while True:
        found: list[tuple[float, Place, Place]] = []
        for size in {*sizes.values()}:
            places = [place for place in divergences if sizes[place] == size]
            gains = {p: left(p) - left(p, 1) for p in places if allows(p, more[p] + 1)}
            costs = {p: left(p, -1) - left(p) for p in places if allows(p, more[p] - 1)}
            if gains and costs:
                to, of = max(gains, key=gains.__getitem__), min(costs, key=costs.__getitem__)
                found.append((gains[to] - costs[of], to, of))
        if not found or max(found)[0] <= 0:
            return moves
        _, to, of = max(found)
        moves.append((to, of))
        more[to] += 1
        more[of] -= 1


def move_bits(
    model: Any,
    ids: Tensor,
    method: LayeredMethod,
    calibrations: Iterable[Calibration] = (),
    journal: Journal | None = None,
) -> list[PerplexityRow]:
    """Find bits by layer, keys and values that lose less than those of ``method`` and take as many bytes, on
    windows ``ids`` ``[N, T]``.

    Returns:
        what was measured of the method as it is, and of the one that was found: its spec has the option
        ``layers``. The same twice where no move gains.

    Raises:
        ValueError: as `perplexity.measure`.
    """
    views, calibrations = attach(model).view.compressed, [*calibrations]
    search = _Search(method, views, _parts(method, views, calibrations))

    def measured(methods: Sequence[LayeredMethod]) -> list[PerplexityRow]:
        return measure(model, ids, methods, calibrations, journal)

    base, *alone = measured([method, *map(search.alone, search.places)])
    divergences = {place: row.kl for place, row in zip(search.places, alone, strict=True)}
    moves, tried = worthwhile(divergences, search.sizes, search.allows), [base]
    while moves:
        by: Counter[Place] = Counter()
        for to, of in moves:
            by[to] += 1
            by[of] -= 1
        tried += measured([search.changed(by)])
        moves = moves[: len(moves) // 2]
    return [base, min(tried, key=lambda row: row.kl)]


class _Search:
    """A method with other bits at some places."""

    def __init__(self, method: LayeredMethod, views: Sequence[AttentionView], parts: Sequence[str]) -> None:
        self._method = method
        self._widths = [method.layer_widths(i) for i in range(len(views))]
        self._allowed = {each.name: each.metadata for each in fields(method)}["bits"]["choices"]
        sizes = [
            {"keys": v.kv_width, "values": v.state_width - v.kv_width, "both": v.state_width} for v in views
        ]
        self.sizes = {(i, part): size[part] for i, size in enumerate(sizes) for part in parts}
        """Numbers of a token at every place."""
        self.places = [*self.sizes]

    def alone(self, place: Place) -> LayeredMethod:
        """The method at one place, and the most bits at all others."""
        most = max(self._allowed)
        widths = [Widths(most, most) for _ in self._widths]
        layer, part = place
        keys, values = self._widths[layer]
        widths[layer] = Widths(most if part == "values" else keys, most if part == "keys" else values)
        return self._method.with_widths(widths)

    def allows(self, place: Place, by: int) -> bool:
        """Whether a place may have so many bits more."""
        layer, part = place
        return all(bits in self._allowed for bits in _plus(self._widths[layer], part, by))

    def changed(self, by: Mapping[Place, int]) -> LayeredMethod:
        """The method with so many more bits at these places."""
        widths = [*self._widths]
        for (layer, part), more in by.items():
            widths[layer] = _plus(widths[layer], part, more)
        return self._method.with_widths(widths)


def _plus(widths: Widths, part: str, by: int) -> Widths:
    """So many bits more at a part of a layer."""
    return Widths(widths.keys + by * (part != "values"), widths.values + by * (part != "keys"))


def _parts(
    method: LayeredMethod, views: Sequence[AttentionView], calibrations: Sequence[Calibration]
) -> tuple[str, ...]:
    """What has bits of its own in a layer."""
    own = next((each for each in calibrations if each.method == method.calibrated_as), None)
    keys, values = method.layer_widths(0)
    try:
        other = Widths(keys, values - 1 if values > 1 else 2)
        method.with_widths([other] * len(views)).codecs(views, own)
    except ValueError:
        return ("both",)
    return "keys", "values"
