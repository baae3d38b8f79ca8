"""`support.models` by the name that scripts outside the repository import, with ``tests`` in PYTHONPATH."""

from support.models import FAMILIES, OTHERS, VOCABULARY, left_padded, prompt, tiny

__all__ = ["FAMILIES", "OTHERS", "VOCABULARY", "left_padded", "prompt", "tiny"]
