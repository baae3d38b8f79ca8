"""CacheOptions: how a cache compresses, as whoever makes it asks for it."""

from dataclasses import dataclass
from os import PathLike
from typing import Any

from ..calibration import Calibration
from ..methods import Method
from ..spec import parse_method

ATTEND = ("chunk", "store")


@dataclass(frozen=True, eq=False)
class CacheOptions:
    """Options of `KVCache`, checked as far as they can be without a model."""

    method: Method
    attend: str = "chunk"
    calibration: Calibration | None = None
    kernel: str = "auto"
    offload: str | None = None

    @classmethod
    def of(
        cls,
        method: str | Method,
        attend: str = "chunk",
        calibration: Calibration | str | PathLike[str] | None = None,
        kernel: str = "auto",
        offload: str | None = None,
    ) -> "CacheOptions":
        """Those that were asked for: a method may be given by its spec, a calibration by its file.

        Raises:
            ValueError: unknown method or option, or a method that cannot ``attend`` in this way.
            OSError: the calibration's file cannot be read.
        """
        method = parse_method(method)
        if attend not in ATTEND:
            raise ValueError(f"attend is {' or '.join(ATTEND)}, not '{attend}'")
        if attend == "store" and not method.causal:
            raise ValueError(
                f"{method.spec} {method.not_causal}, so what it stores of a token is not known when"
                " the token attends to itself: it can generate, but not attend to the store alone"
            )
        if offload not in (None, "cpu"):
            raise ValueError(f"offload is None or 'cpu', not '{offload}'")
        if isinstance(calibration, str | PathLike):
            calibration = Calibration.load(calibration)
        return cls(method, attend, calibration, kernel, offload)

    @property
    def through_store(self) -> bool:
        """Whether every token reads the store, itself included."""
        return self.attend == "store"

    @property
    def arguments(self) -> tuple[Any, ...]:
        """As `KVCache` takes them after the model."""
        return self.method, self.attend, self.calibration, self.kernel, self.offload
