"""A linear layer whose weight is packed: an ``nn.Linear`` that became one in place."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class PackedWeight(ABC):
    """The weight ``[N, C]`` of a linear layer in another form, on the CPU."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that it takes."""

    @abstractmethod
    def dense(self) -> Tensor:
        """The weight ``[N, C]``, in memory of its own."""

    @abstractmethod
    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """``rows @ weight.T + bias`` of ``rows`` ``[M, C]``, contiguous."""

    @abstractmethod
    def applied(self, fn: Callable[[Tensor], Tensor]) -> "PackedWeight":
        """This weight after ``fn`` moved or cast it, as modules do with parameters.

        Raises:
            ValueError: it cannot be packed where or as what it is now.
        """


def refused(weight: Tensor) -> ValueError:
    """Of a weight that was moved or cast to what cannot be packed."""
    return ValueError(
        f"packed weights stay on the CPU, not {weight.dtype} on {weight.device}: unpack_weights(model) first"
    )


class PackedLinear(nn.Linear):
    """A linear layer with a packed weight. An ``nn.Linear`` becomes one in place, so that its hooks stay."""

    packed: PackedWeight

    @staticmethod
    def take(module: nn.Module, pack: Callable[[Tensor], PackedWeight]) -> None:
        """Make a packed layer of an ``nn.Linear``."""
        weight = module._parameters["weight"]
        assert weight is not None
        packed = pack(weight.detach())
        del module._parameters["weight"]
        module.__class__ = PackedLinear
        module.__dict__["packed"] = packed

    def give_back(self) -> None:
        """Be an ``nn.Linear`` again."""
        weight = self.weight
        del self.packed
        self.__class__ = nn.Linear  # type: ignore[assignment]
        self.register_parameter("weight", nn.Parameter(weight))

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """A copy ``[N, C]``, unpacked."""
        return self.packed.dense()

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled() and input.requires_grad:
            return F.linear(input, self.weight, self.bias)
        rows = self.packed.multiply(input.reshape(-1, self.in_features), self.bias)
        return rows.view(*input.shape[:-1], self.out_features)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PackedLinear":
        packed = self.packed.applied(fn)
        super()._apply(fn, recurse)
        self.packed = packed
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight
        super()._save_to_state_dict(destination, prefix, keep_vars)
