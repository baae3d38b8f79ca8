"""By which name attention layers find our attention function, while their model keeps its own for others."""

from collections.abc import Iterable
from typing import Any, Protocol

from torch import nn

from .. import compat
from ..models import AttentionView
from ..models.layer_config import LayerConfig

WRAPPED = ("eager", "sdpa")
"""Implementations of transformers that ours stand before."""
PREFIX = "xquant_"
"""Of the names of our attention functions."""
NAMES = {name: PREFIX + name for name in WRAPPED}
"""Of our attention functions, by those that they stand before."""


class FunctionName:
    """The name of the attention function that layers of one configuration call.

    Args:
        asked: whether they call the function that their configuration names.
    """

    def __init__(self, config: Any, asked: bool) -> None:
        self._given = config
        self._read: Any = LayerConfig(config, NAMES) if asked else config
        self._modules: list[nn.Module] = []
        self.follow()

    def give(self, module: nn.Module) -> None:
        if self._read is not self._given:
            module.config = self._read
            self._modules.append(module)

    def follow(self) -> None:
        """See what it is now. Called when a forward pass begins."""
        self.now: str = self._read._attn_implementation or ""

    def give_back(self) -> None:
        """Have the layers read the model's own configuration again."""
        for module in self._modules:
            if module.config is self._read:
                module.config = self._given


class Named(Protocol):
    """A layer that is told the name."""

    view: AttentionView
    named: FunctionName


def name_functions(layers: Iterable[Named], default: Any) -> list[FunctionName]:
    """Name our attention function to layers.

    Args:
        default: the configuration of layers that have none themselves, and so ask for no name.
    """
    names: dict[tuple[int, bool], FunctionName] = {}
    for hooks in layers:
        module = hooks.view.module
        config = getattr(module, "config", None)
        asked = config is not None and compat.asks_interface(module)
        config = default if config is None else config
        key = id(config), asked
        if key not in names:
            names[key] = FunctionName(config, asked)
        names[key].give(module)
        hooks.named = names[key]
    return list(names.values())
