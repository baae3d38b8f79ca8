"""The tensors that a calibration must hold. A method says it once: planning takes the shapes from it, and
what is read from a file is checked against it before any kernel sees it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Expected:
    """One tensor: its shape, its type and what its numbers must be. They are finite, whatever else.

    ``least`` and ``most`` bound them; ``rising``: along the first dimension none is below the one before it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    least: float = -math.inf
    most: float = math.inf
    rising: bool = False

    def blank(self) -> Tensor:
        """A tensor that fits, without the numbers: of one dimension zeros, of more on no device."""
        vector = len(self.shape) == 1
        make = torch.zeros if vector else torch.empty
        return make(self.shape, dtype=self.dtype, device="cpu" if vector else "meta")

    def fault(self, found: Tensor) -> str:
        """What is wrong with a tensor, empty where it fits. On the meta device there are no numbers to look
        at."""
        if found.dtype != self.dtype or found.shape != self.shape:
            return f"is {kind(found)}, not {kind(self)}"
        if found.is_meta or not found.numel():
            return ""
        low, high = (float(end) for end in found.aminmax())  # NaN is both
        if not (math.isfinite(low) and math.isfinite(high)):
            return "holds NaN or infinity"
        if low < self.least or high > self.most:
            return f"holds {low:g} to {high:g}, not {self.least:g} to {self.most:g}"
        if self.rising and bool((found[1:] < found[:-1]).any()):
            return "is not in rising order"
        return ""


def kind(tensor: Tensor | Expected) -> str:
    """Type and shape in words: ``float16 [2, 24]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def check(
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, Expected],
    advice: str = "calibrate again",
) -> None:
    """Raise ValueError unless ``tensors`` are those that are ``expected``, no more and no fewer: it names the
    first that is not, and gives the ``advice``."""
    for name, wanted in expected.items():
        if name not in tensors:
            raise ValueError(f"the calibration lacks '{name}' ({kind(wanted)}): {advice}")
        if fault := wanted.fault(tensors[name]):
            raise ValueError(f"'{name}' of the calibration {fault}: {advice}")
    for name in tensors:
        if name not in expected:
            raise ValueError(
                f"the calibration holds '{name[:80]}', which the method does not know: {advice}"
            )
