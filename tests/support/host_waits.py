"""What the host would wait for, were tensors on a GPU, and kernels that are not run."""

import inspect
from typing import Any

import torch
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
