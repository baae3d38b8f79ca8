"""Triton's interpreter, which runs kernels on the CPU (conftest.py asks for it)."""

from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter

from xquant.kernels import choose, trial, triton
from xquant.kernels.torch import FOLDED, REFERENCE

_PATCH = interpreter._patch_lang_tensor
_PATCH_ALL = interpreter._patch_lang
_PATCHED = "_patched_by_tests"
_DOT = interpreter.InterpreterBuilder.create_dot


def mend() -> None:
    """Have the interpreter of Triton 3.6 do what it does not."""
    interpreter._patch_lang_tensor = _allow_bounds
    interpreter._patch_lang = _patch_once
    interpreter.InterpreterBuilder.create_dot = _multiply


def take_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ``auto`` choose on the CPU as on a GPU, in a process that has tried nothing yet."""
    monkeypatch.setattr(choose, "fastest_first", lambda device: (triton.BACKEND, FOLDED, REFERENCE))
    monkeypatch.setattr(FOLDED, "gains", lambda codec, block: False)  # as on a GPU
    monkeypatch.setattr(trial, "_failures", {})
    monkeypatch.setattr(trial, "_warned", set())


def _patch_once(fn: Any) -> Any:
    """It patches the language anew for every function that a kernel calls, which takes most of the time."""
    modules = {value for value in fn.__globals__.values() if value is tl or value is tl.core}
    if all(hasattr(module, _PATCHED) for module in modules):
        return interpreter._LangPatchScope()
    scope = _PATCH_ALL(fn)
    for module in modules:
        scope.set_attr(module, _PATCHED, True)
    return scope


def _allow_bounds(tensor: Any, scope: Any) -> None:
    """It makes bounds of loops from arrays of one element, which numpy 2.4 refuses."""
    _PATCH(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _multiply(self: Any, a: Any, b: Any, *args: Any) -> Any:
    """It holds bf16 as whole numbers, and would multiply these."""
    return _DOT(self, _widened(a), _widened(b), *args)


def _widened(x: Any) -> Any:
    if x.dtype.scalar != tl.bfloat16:
        return x
    wide = (x.data.astype(np.uint32) << 16).view(np.float32)
    return interpreter.TensorHandle(wide, tl.float32)
