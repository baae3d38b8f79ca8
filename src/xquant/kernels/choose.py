"""Which backend serves a layer, and why: the one place that chooses."""

import warnings
from dataclasses import dataclass
from functools import cache

import torch

from ..methods import LayerCodec
from ..past.exact import ExactAttention, torch_attention
from ..past.packer import Packer
from . import KERNELS, cpu, cuda, triton
from .backend import NOTHING_PACKED, Backend, unread
from .prompts import PromptAttention
from .torch import FOLDED, REFERENCE
from .trial import Trial

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (cuda.BACKEND, triton.BACKEND, *cpu.BACKENDS.values(), FOLDED, REFERENCE)
}


@dataclass(frozen=True)
class Choice:
    """A backend, and why no faster one where it is not the fastest."""

    backend: Backend
    why: str = ""

    def __str__(self) -> str:
        return f"{self.backend.name} ({self.why})" if self.why else self.backend.name


def fastest_first(device: torch.device) -> tuple[Backend, ...]:
    """What ``auto`` asks for a layer on ``device``, in this order; the last reads everything."""
    natives = (cuda.BACKEND, triton.BACKEND) if device.type == "cuda" else (cpu.best(),)
    return *natives, FOLDED, REFERENCE


def choose(
    codec: LayerCodec,
    block: int,
    wanted: str = "auto",
    through_store: bool = False,
    trial: Trial | None = None,
) -> Choice:
    """The backend for a layer of blocks of ``block`` tokens; ``trial``: of those that ``auto`` compares with
    the reference before it takes them, if it is to.

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
    if wanted == "auto":
        *natives, folded, reference = fastest_first(codec.view.device)
        for native in natives:
            why = refused = refusal(native)
            if not why and native.tried and trial is not None:
                why = trial.failure(native, codec)  # which warns by itself
            if not why:
                return Choice(native, "agrees with the reference" if native.tried else "")
        if refused and not through_store:
            warn_of_torch(refused)
        gains = not refusal(folded) and folded.gains(codec, block)
        return Choice(folded if gains else reference, why)
    backend = BACKENDS[wanted]
    if why := refusal(backend):
        raise ValueError(f"kernel '{wanted}' cannot be used: {why}")
    return Choice(backend, "" if backend is cpu.best() else "asked for")


def warn_of_torch(why: str) -> None:
    """Say, once in a process for every reason, that no kernel reads what is packed, where something is."""
    if why == cpu.library.absence():
        cpu.library.warn_of_absence()
    elif why != NOTHING_PACKED:
        _warn(why)


@cache
def _warn(why: str) -> None:
    warnings.warn(
        f"xquant: attention runs in torch, where decoding may take longer than with the full cache: {why}",
        RuntimeWarning,
        stacklevel=2,
    )


@cache
def prompts_of(wanted: str) -> PromptAttention | None:
    """What attends for prompts over whole states; None where the model's own attention is asked for, or as
    fast."""
    exact = exact_of(wanted, torch.device("cpu"))
    return None if exact is torch_attention else PromptAttention(exact)


def exact_of(wanted: str, device: torch.device) -> ExactAttention:
    """What attends for prompts on ``device`` over states that are not packed; ``wanted`` as of `choose`."""
    backend = fastest_first(device)[0] if wanted == "auto" else BACKENDS[wanted]
    return backend.exact


def packer_of(wanted: str, device: torch.device) -> Packer:
    """What a cache of this kernel packs the blocks of layers on ``device`` with: what was asked for, torch
    where that cannot run."""
    first = fastest_first(device)[0]
    packing = triton.BACKEND if first is cuda.BACKEND else first
    if wanted == "auto":
        return packing.tried_packer
    return (packing if wanted == "cuda" else BACKENDS[wanted]).packer
