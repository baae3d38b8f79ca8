"""Triton's interpreter, which runs kernels on the CPU (conftest.py asks for it)."""

from typing import Any

from triton.runtime import interpreter

_PATCH = interpreter._patch_lang_tensor


def allow_bounds() -> None:
    """Triton 3.6 makes bounds of loops from arrays of one element, which numpy 2.4 refuses."""

    def patch(tensor: Any, scope: Any) -> None:
        _PATCH(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch
