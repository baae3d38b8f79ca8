"""By which name attention layers find our attention function, while their model keeps its own for others."""

import copy
from collections.abc import Iterable
from typing import Any

from torch import nn

from .. import compat
from .attention import WRAPPED
from .layer import PREFIX, LayerHooks


class FunctionName:
    """The name of the attention function that layers of one configuration call.

    They read it in a copy of the configuration. What a model's own says is read by others: engines that batch
    continuously, functions that make masks, users.
    """

    def __init__(self, config: Any, asked: bool) -> None:
        self.implementation = ""
        self._config = config
        self._copy = copy.copy(config) if asked else None
        self._modules: list[nn.Module] = []
        self.follow()

    def of(self, module: nn.Module) -> None:
        """Have the layer read the copy, if it asks for a name at all."""
        if self._copy is not None:
            module.config = self._copy
            self._modules.append(module)

    def follow(self) -> None:
        """See what the model's configuration says now. Called before every forward pass."""
        name = self._config._attn_implementation or ""
        if self._copy is not None:
            if name in WRAPPED:
                name = PREFIX + name
            compat.follow(self._copy, self._config, name)
        self.implementation = name

    def give_back(self) -> None:
        """Have the layers read the model's own configuration again."""
        for module in self._modules:
            if module.config is self._copy:
                module.config = self._config


def name_functions(layers: Iterable[LayerHooks], default: Any) -> list[FunctionName]:
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
        names[key].of(module)
        hooks.named = names[key]
    return list(names.values())
