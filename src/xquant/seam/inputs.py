"""What modules are given among their arguments, whatever the names."""

import copy
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .passes import ObservingCache


def between(model: nn.Module, decoder: nn.Module) -> list[nn.Module]:
    """The modules on the way from ``model`` to the ``decoder`` in it."""
    names = (name for name, module in model.named_modules() if module is decoder)
    *parents, _ = next(names, "").split(".")
    return [model.get_submodule(".".join(parents[: i + 1])) for i in range(len(parents))]


def cache_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ObservingCache | None:
    inputs = (*kwargs.values(), *args)
    return next((given for given in inputs if isinstance(given, ObservingCache)), None)


def replaced(inputs: Any, cache: ObservingCache) -> Any:
    """The inputs of a module with a copy of ``cache`` in its place."""
    return tree_map(lambda given: copy.deepcopy(cache) if given is cache else given, inputs)


def ids_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The ids of tokens ``[B, T]`` that a model is given."""
    given = kwargs.get("input_ids", args[0] if args else None)
    is_ids = isinstance(given, Tensor) and given.dim() == 2 and not given.is_floating_point()
    return given if is_ids else None


def tokens_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The input of a decoder, ``[B, T, ...]``: token ids or embeddings, or what stands for them."""
    named = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
    inputs = (*named, *args, *kwargs.values())
    return next((t for t in inputs if isinstance(t, Tensor) and t.dim() > 1), None)
