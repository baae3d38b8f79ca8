"""A linear layer whose weight is packed: an ``nn.Linear`` that became one in place."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class PackedLinear(nn.Linear):
    """A linear layer with its weight ``[N, C]`` in another form, on the CPU. An ``nn.Linear`` becomes one in
    place, so that its hooks stay."""

    packed: Tensor
    dtypes: ClassVar[tuple[torch.dtype, ...]]
    """Of weights that can be packed."""

    @abstractmethod
    def pack(self, weight: Tensor) -> None:
        """Hold this weight."""

    @abstractmethod
    def dense(self) -> Tensor:
        """The weight ``[N, C]``, in memory of its own."""

    @abstractmethod
    def multiply(self, rows: Tensor) -> Tensor:
        """The outputs ``[M, N]`` for ``rows`` ``[M, C]``."""

    @abstractmethod
    def pack_applied(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Hold the same weight after ``fn`` moved or cast it, as modules do with parameters.

        Raises:
            ValueError: it cannot be packed where or as what it is then.
        """

    @classmethod
    def take(cls, module: nn.Module, **how: Any) -> None:
        """Make a packed layer of an ``nn.Linear``, with attributes that say ``how``."""
        weight = module._parameters.pop("weight")
        assert weight is not None
        module.__class__ = cls
        assert isinstance(module, cls)
        module.__dict__.update(how)
        module.pack(weight.detach())

    def give_back(self) -> None:
        """Be an ``nn.Linear`` again."""
        weight = self.weight
        for name in self.held():
            delattr(self, name)
        self.__class__ = nn.Linear  # type: ignore[assignment]
        self.register_parameter("weight", nn.Parameter(weight))

    @classmethod
    def held(cls) -> tuple[str, ...]:
        """The names of what it holds in place of a parameter."""
        return ("packed",)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """A copy ``[N, C]``, unpacked."""
        return self.dense()

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled() and input.requires_grad:
            return F.linear(input, self.weight, self.bias)
        rows = self.multiply(input.reshape(-1, self.in_features))
        return rows.view(*input.shape[:-1], self.out_features)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PackedLinear":
        self.pack_applied(fn)
        super()._apply(fn, recurse)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def refuse_unpackable(self, weight: Tensor) -> None:
        """Refuse a weight that was moved or cast to what cannot be packed."""
        if weight.device.type != "cpu" or weight.dtype not in self.dtypes:
            raise ValueError(
                f"packed weights stay on the CPU, not {weight.dtype} on {weight.device}:"
                " unpack_weights(model) first"
            )
