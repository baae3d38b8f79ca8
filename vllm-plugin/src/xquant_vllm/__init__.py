"""The plugin for vLLM.

vLLM calls `register` in each of its processes, whether or not an engine asks for xquant. ``guard.py`` looks
at its version first. All others import it where they know that version.
"""

VERSION = "0.32"
"""The minor version of vLLM that is supported."""


def register() -> None:
    """Let vLLM know of the methods: the entry point ``vllm.general_plugins``."""
    from . import guard

    guard.install()
