"""A method as a value of ``--kv-cache-dtype``: vLLM 0.33 lets others add values, 0.32 has a closed list.

Without that registry nothing here does anything, and vLLM itself refuses the names. With it, a name is
registered where it is asked for, and again in each process that is given the configuration: there are more
specs than a list could hold.
"""

import re
from typing import Any

import torch

from .guard import KEY

PREFIX = "xquant_"
"""What our names begin with."""
SKIPPED = ["sliding_window"]
"""Layers that vLLM keeps in the dtype of the model, as ``kv_cache_dtype_skip_layers`` names them."""


def is_ours(name: Any) -> bool:
    """Whether a dtype names a method, or was meant to."""
    return isinstance(name, str) and name.startswith(PREFIX)


def spec_of(name: str) -> str:
    """The spec that a name stands for: behind the prefix, ``_`` is written for ``-``, and ``__`` for ``_``.
    The rest is as in the spec, options too, since vLLM only compares names."""
    return re.sub("__?", lambda found: "_" if found[0] == "__" else "-", name.removeprefix(PREFIX))


def registry() -> Any:
    """The module of vLLM where dtypes are registered; None: this vLLM has no such thing."""
    from vllm.config import cache

    return cache if hasattr(cache, "register_kv_cache_dtype") else None


def name_in(config: Any) -> str:
    """Our name in an engine's arguments or in its configuration; empty where there is none."""
    held = getattr(config, "cache_config", None)
    name = config.kv_cache_dtype if held is None else held.cache_dtype
    return name if is_ours(name) and registry() is not None else ""


def joined(asked: dict[str, Any], name: str) -> dict[str, Any]:
    """What is asked for in ``additional_config``, with the method that a dtype names.

    Raises:
        ValueError: there it is another one, or no method has the name.
    """
    if not name:
        return asked
    from xquant.serve import fit  # ``guard.py`` knows our names without the library

    method, spec = fit.parse(spec_of(name)), asked.get(KEY, spec_of(name))
    if fit.parse(spec) != method:
        raise ValueError(
            f"xquant: kv_cache_dtype={name} is {method.spec}, and additional_config says {KEY}={spec}:"
            " leave one of them out"
        )
    return {**asked, KEY: spec}


def prepare(args: Any) -> None:
    """Let vLLM take the dtype that an engine's arguments name, if it is ours.

    Raises:
        ValueError: other layers are to be left out, or somebody else has the name.
    """
    if not name_in(args):
        return
    if args.kv_cache_dtype_skip_layers not in ([], SKIPPED):
        raise ValueError("xquant: kv_cache_dtype_skip_layers is not served yet")
    args.kv_cache_dtype_skip_layers = list(SKIPPED)
    make_known(args)


def make_known(config: Any) -> None:
    """Register the name in this process, if it is ours and not registered yet.

    Raises:
        ValueError: somebody else has it.
    """
    if not (name := name_in(config)):
        return
    known = registry()
    if known.is_known_kv_cache_dtype(name):
        if not isinstance(known.get_kv_cache_dtype_handler(name), Pages):
            raise ValueError(f"xquant: the KV cache dtype '{name}' is taken by another plugin")
        return
    known.register_kv_cache_dtype(name)(type(Pages.__name__, (Pages,), {"name": name}))


class Pages:
    """What vLLM is told of a cache of packed pages."""

    name: str

    def torch_dtype(self) -> torch.dtype:
        """Of a page: bytes. Its layers say themselves how many."""
        return torch.uint8

    def quant_mode(self) -> Any:
        """None of vLLM's: any other, ``CUSTOM`` too, counts as quantized, and vLLM looks for scales.
        In 0.33.0 ``CUSTOM`` is also the number of a format for AMD's GPUs."""
        from vllm.v1.kv_cache_interface import KVQuantMode

        return KVQuantMode.NONE
