"""Which calibrator gathers the statistics of a method: one entry for each class of methods that needs them.

Methods do not know their calibrators. A method from outside the package registers its own with
`make_calibrator.register`.
"""

from collections.abc import Sequence
from functools import singledispatch

from ..methods import KVTC, KVQuant, Method, Oscar, Transform
from ..models import AttentionView
from .calibrator import Calibrator
from .kvquant import KVQuantCalibrator
from .kvtc import KVTCCalibrator
from .oscar import OscarCalibrator
from .transform import TransformCalibrator


def find_calibrator(method: Method, views: Sequence[AttentionView]) -> Calibrator:
    """A new calibrator for ``method`` on the layers ``views``.

    Raises:
        ValueError: the method needs no calibration, or no calibrator is registered for its class.
    """
    if not method.needs_calibration:
        raise ValueError(f"{method.spec} needs no calibration")
    return make_calibrator(method, views)


@singledispatch
def make_calibrator(method: Method, views: Sequence[AttentionView]) -> Calibrator:
    """The calibrator of a class of methods, of derived classes too."""
    raise ValueError(f"{method.spec} needs a calibration, but no calibrator is registered for it")


make_calibrator.register(KVQuant, KVQuantCalibrator)
make_calibrator.register(KVTC, KVTCCalibrator)
make_calibrator.register(Oscar, OscarCalibrator)
make_calibrator.register(Transform, TransformCalibrator)
