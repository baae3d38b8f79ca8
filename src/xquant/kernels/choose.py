"""Which backend serves a layer, and why: the one place that chooses."""

from dataclasses import dataclass

from ..methods import LayerCodec
from ..store.packer import Packer
from . import KERNELS, cpu, triton
from .backend import Backend, unread
from .torch import FOLDED, REFERENCE

BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (triton.BACKEND, *cpu.BACKENDS.values(), FOLDED, REFERENCE)
}


@dataclass(frozen=True)
class Choice:
    """A backend, and why no faster one where it is not the fastest."""

    backend: Backend
    why: str = ""

    def __str__(self) -> str:
        return f"{self.backend.name} ({self.why})" if self.why else self.backend.name


def choose(codec: LayerCodec, block: int, through_store: bool, wanted: str = "auto") -> Choice:
    """The backend for a layer of blocks of ``block`` tokens.

    Raises:
        ValueError: ``wanted`` is not a kernel, cannot run on this machine, or cannot read this layer.
    """

    def refusal(backend: Backend) -> str:
        if backend is REFERENCE:
            return ""
        if through_store:
            return "every token reads the store"
        return unread(codec) or backend.unfit(codec, block) or backend.missing(codec)

    if wanted not in KERNELS:
        raise ValueError(f"kernel is one of {', '.join(KERNELS)}, not '{wanted}'")
    native = cpu.best()
    if wanted == "auto":
        fastest_first = (native, FOLDED, REFERENCE)
        fit = (b for b in fastest_first if not refusal(b) and b.gains(codec, block))
        why = refusal(native)
        if why and why == cpu.library.absence():
            cpu.library.warn_of_absence()
        return Choice(next(fit), why)
    backend = BACKENDS[wanted]
    if why := refusal(backend):
        raise ValueError(f"kernel '{wanted}' cannot be used: {why}")
    return Choice(backend, "" if backend is native else "asked for")


def reader_of_pages(codec: LayerCodec, block: int) -> Backend | None:
    """The backend that may read the pages of a layer in an engine; None where none can."""
    backend = triton.BACKEND if codec.view.device.type == "cuda" else cpu.best()
    why = unread(codec) or backend.unfit(codec, block) or backend.missing(codec)
    return None if why else backend


def packer_of(wanted: str) -> Packer:
    """What a cache of this kernel packs its blocks with: what was asked for, torch where that cannot run."""
    backend = cpu.best() if wanted == "auto" else BACKENDS[wanted]
    return backend.packer
