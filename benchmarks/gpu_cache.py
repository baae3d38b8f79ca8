"""Compiles what benchmarks/gpu.py needs for an H100 or H200, which need not be there, into one small file:
on the GPU it is then found, and what is missing costs time only.

    python benchmarks/gpu_cache.py build/gpu-cache.tar.xz

Python, torch and Triton must be those of the machine with the GPU. Kernels are started as on one, on caches
of a few blocks, and nothing is computed.
"""

import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lab/src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from on_gpu import kept
from on_gpu.plan import WHOLE

TARGET = "sm_90"
CONTEXT = 700
"""Tokens, in place of all that are timed: kernels do not depend on how many there are."""
LAYERS = 1


class Started:
    """In place of a kernel of CUDA C++: it is compiled, and not run."""

    slots = 264

    def __init__(self, device: Any, constants: Any) -> None:
        from xquant.kernels.cuda import program

        program.compiled(TARGET, constants)

    def launch(self, *given: Any) -> None:
        pass


def take_for_a_gpu() -> None:
    """Tensors on the CPU are taken for some on a GPU, for the rest of this process."""
    from support import fake_gpu
    from xquant.kernels import choose, cuda, triton
    from xquant.kernels.torch import FOLDED, REFERENCE

    fake_gpu.install(compiles=True)
    natives = cuda.BACKEND, triton.BACKEND
    choose.fastest_first = lambda device: (*natives, FOLDED, REFERENCE)
    cuda.support.missing = lambda device: ""
    cuda.program.program = Started  # type: ignore[assignment]


def jobs() -> dict[str, Callable[[], None]]:
    """What starts kernels, the most wanted first."""
    import torch
    from on_gpu import steps, sweep, timed
    from on_gpu.correct import cases
    from on_gpu.machine import Machine

    from support.attention_cases import error, filled
    from xquant_lab.bench import appending
    from xquant_lab.bench.contenders import Compressed, Static

    batches = {batch for _, batch in (*WHOLE.attention, *WHOLE.others)}
    machine = Machine("cpu", replace(WHOLE, long=CONTEXT, sweep=(CONTEXT, WHOLE.sweep[1]), rounds=1))
    model = machine.shaped(LAYERS).attached(machine.dtype)

    def correct() -> None:
        for case in cases(machine):
            for kernel in ("auto", "cuda", "triton"):
                with suppress(ValueError, AssertionError):  # it is not read by this kernel
                    error(one := replace(case, path=kernel), filled(one))

    def attention() -> None:
        for spec in (*timed.METHODS, *timed.OTHERS):
            for batch in batches:
                for kernel in ("auto", "cuda", "triton"):
                    with suppress(ValueError):
                        method = machine.method(spec)
                        Compressed(model, method, CONTEXT, batch, None, kernel).attend()

    def static() -> None:
        for spec in steps.METHODS:
            for kernel in ("auto", "cuda", "triton"):
                size = CONTEXT, WHOLE.steps[1]
                contender = Static(model, machine.method(spec), size, 1, None, kernel)
                contender.step()

    def sealing() -> None:
        for spec in timed.METHODS[:2]:
            method = machine.method(spec)
            for _, batch in WHOLE.sealing:
                contender = Compressed(model, method, CONTEXT, batch, None, "auto")
                appending.time_appending(contender)

    def swept() -> None:
        for _ in sweep.sweep(machine):
            pass

    torch.set_grad_enabled(False)
    found = (attention, static, correct, swept, sealing)
    return {job.__name__: job for job in found}


@click.command()
@click.argument("archive", type=click.Path(path_type=Path, dir_okay=False))
def main(archive: Path) -> None:
    """Compile, and pack what there is after every job."""
    kept.empty()
    os.environ |= {
        **kept.environment(kept.FOLDER),
        "TRITON_INTERPRET": "0",
        "XQUANT_TEST_DEVICE": "cpu",
    }
    warnings.simplefilter("ignore")  # nothing agrees with the reference
    take_for_a_gpu()
    start, failed = time.monotonic(), False
    for name, job in jobs().items():
        try:
            job()
        except Exception:  # what is compiled is worth having
            traceback.print_exc()
            failed = True
        kept.pack(archive)
        count, seconds = len(list(kept.FOLDER.rglob("*.cubin"))), time.monotonic() - start
        size = archive.stat().st_size / 1e6
        click.echo(f"{name}: {count} kernels in {size:.1f} MB after {seconds:.0f} s")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
