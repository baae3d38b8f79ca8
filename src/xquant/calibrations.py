"""Which calibration serves a method, of those that a run was given or has made."""

from collections.abc import Iterable, Iterator

from .calibration import Calibration
from .methods import Method


class Calibrations:
    """Artifacts, each for the methods whose `calibrated_as` it names; of two for the same, the last."""

    def __init__(self, made: Iterable[Calibration] = ()) -> None:
        self._made = {each.method: each for each in made}

    def __iter__(self) -> Iterator[Calibration]:
        return iter(self._made.values())

    def __len__(self) -> int:
        return len(self._made)

    def of(self, method: Method) -> Calibration | None:
        """The artifact for ``method``. None where there is none, and it either needs none or calibrates
        itself: a `KVCache` then finds the stored one (`calibration_store`).

        Raises:
            ValueError: there is none where one is needed.
        """
        found = self._made.get(method.calibrated_as)
        if found is None and method.needs_calibration and not method.calibrates_itself:
            raise ValueError(method.how_to_calibrate)
        return found

    def lacking(self, methods: Iterable[Method]) -> list[Method]:
        """Those of ``methods`` that lack the artifact they need: the first of several that share one."""
        found: dict[str, Method] = {}
        for method in methods:
            if method.needs_calibration and method.calibrated_as not in self._made:
                found.setdefault(method.calibrated_as, method)
        return list(found.values())
