"""What the host would wait for, were tensors on a GPU, and what is launched there."""

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ATEN = torch.ops.aten


class Silent(TorchDispatchMode):
    """Refuses what the host would wait for, were the tensors on a GPU."""

    ASKING = (
        ATEN._local_scalar_dense.default,
        ATEN.is_nonzero.default,
        ATEN.equal.default,
        ATEN.nonzero.default,
        ATEN.masked_select.default,
        ATEN._unique2.default,
        ATEN.repeat_interleave.Tensor,
        ATEN.lift_fresh.default,  # a tensor of what Python holds, which would be copied there
    )
    INDEXING = (ATEN.index.Tensor, ATEN.index_put.default, ATEN.index_put_.default)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asks = func in self.ASKING or (
            func in self.INDEXING
            and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        )
        assert not asks, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


class Unlaunched:
    """In place of a kernel that writes its argument ``out``: only the host's side runs."""

    def __init__(self, kernel: Any, out: str, grids: list[Any] | None = None) -> None:
        self.out = list(inspect.signature(kernel.fn).parameters).index(out)
        self.grids = [] if grids is None else grids
        """Of what was launched; they are added here."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        # A tensor, or a group of arguments: both have `data`.
        return lambda *args, **kwargs: args[self.out].data.zero_()

    def warmup(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is compiled."""


PASSING = {"call", "key", "value", "out", "sums", "sums_out", "maxima", "maxima_out"}
"""Arguments that a graph gives memory which stays: what layers compute, and what kernels leave each other."""


class Launches:
    """In place of a kernel: runs it, and notes what it was given."""

    def __init__(self, kernel: Any, noted: list[Any]) -> None:
        self._kernel, self._noted = kernel, noted
        self._names = list(inspect.signature(kernel.fn).parameters)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            given = {**dict(zip(self._names, args, strict=False)), **kwargs}
            told = {name: _told(each, name not in PASSING) for name, each in given.items()}
            self._noted.append((grid, told))
            self._kernel[grid](*args, **kwargs)

        return launch


def _told(argument: Any, stays: bool) -> Any:
    """What a launch is told by an argument."""
    if isinstance(argument, Tensor):
        where = argument.data_ptr() if stays else 0
        return where, argument.shape, argument.stride(), argument.dtype
    if isinstance(argument, tuple):
        return tuple(_told(each, stays) for each in argument)
    return argument
