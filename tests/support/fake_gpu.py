"""A GPU that is not there: kernels are specialized and started as on one, compiled if that is wanted, and not
run.

Triton chooses the variant of a kernel by what it is started with: types, constants, ones, and what is a
multiple of 16. A variant that is new takes seconds to compile. Here it is a `Kernel` that writes zeros.

Written for Triton 3.6, of which `JITFunction._do_compile` is replaced. Nothing may be interpreted, so this is
for processes of their own with ``TRITON_INTERPRET=0``, such as `kernel_variants.py`.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from xquant.kernels.triton import support

WRITTEN = ("out", "sums", "codes", "scale", "zero", "plain")
"""Arguments that kernels write, beside those that end in `_out`."""


class Started(NamedTuple):
    """A launch."""

    kernel: str
    constants: str
    """What it is compiled for by who starts it."""
    variant: str
    """All that it is compiled for."""
    grid: tuple[int, int, int]


class FakeGPU:
    """In place of Triton's driver."""

    def __init__(self) -> None:
        self.started: list[Started] = []

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Kernel:
    """In place of a compiled kernel."""

    n_regs, function, packed_metadata = 128, None, None

    def __init__(self, gpu: FakeGPU, function: Any, variant: str, constants: Any, options: Any):
        self.metadata = SimpleNamespace(num_warps=options.num_warps, shared=50_000)
        own = [constants[number,] for number in function.constexprs]
        self._gpu, self._names = gpu, function.arg_names
        self._key = function.__name__, str([*own, options.num_warps]), variant

    def launch_metadata(self, *args: Any) -> None:
        pass

    def run(self, *args: Any) -> None:
        grid, given = args[:3], args[9:]
        self._gpu.started.append(Started(*self._key, grid))
        for name, each in zip(self._names, given, strict=True):
            if name in WRITTEN or name.endswith("_out"):
                each.data.zero_()  # a tensor, or a group of arguments


def install(compiles: bool = False) -> FakeGPU:
    """Have Triton run on a GPU that is not there.

    Args:
        compiles: kernels are compiled for it too, to be found in Triton's folder.
    """
    gpu, own = FakeGPU(), JITFunction._do_compile

    def compiled(
        function: Any,
        key: str,
        signature: Any,
        device: int,
        constants: Any,
        options: Any,
        *more: Any,
    ) -> Kernel:
        if compiles:
            own(function, key, signature, device, constants, options, *more)
        made = Kernel(gpu, function, key, constants, options)
        function.device_caches[device][0][key] = made
        return made

    driver.set_active(gpu)
    JITFunction._do_compile = compiled
    support.missing = lambda device: ""
    return gpu
