"""CacheOptions: how a cache compresses, as whoever makes it asks for it."""

from dataclasses import dataclass
from os import PathLike
from typing import Any

from ..calibration import Calibration
from ..methods import Method
from ..sizes import in_bytes
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
    budget: int | None = None
    """Bytes of the cache up to which tokens stay in full."""

    @classmethod
    def of(
        cls,
        method: str | Method,
        attend: str = "chunk",
        calibration: Calibration | str | PathLike[str] | None = None,
        kernel: str = "auto",
        offload: str | None = None,
        budget: int | str | None = None,
    ) -> "CacheOptions":
        """Those that were asked for: a method may be given by its spec, a calibration by its file.

        Raises:
            ValueError: unknown method or option, a method that cannot ``attend`` in this way, or a budget
                that is no size.
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
        if budget is not None and attend == "store":
            raise ValueError("with attend=store every token reads the store: a budget keeps tokens out of it")
        if isinstance(calibration, str | PathLike):
            calibration = Calibration.load(calibration)
        room = None if budget is None else in_bytes(budget)
        return cls(method, attend, calibration, kernel, offload, room)

    @property
    def through_store(self) -> bool:
        """Whether every token reads the store, itself included."""
        return self.attend == "store"

    @property
    def arguments(self) -> tuple[Any, ...]:
        """As `KVCache` takes them after the model."""
        return self.method, self.attend, self.calibration, self.kernel, self.offload, self.budget
