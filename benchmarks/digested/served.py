"""A layer over an engine's pages: what sequences read, and the bytes of pages and rings."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch

from support.models import tiny
from support.paged_sequences import KEPT, KERNEL_SPECS, SPECS, STEPS, Engine, codec_of
from xquant.kernels import cpu, triton
from xquant.kernels.backend import Backend
from xquant.past.step import Retention

from .common import Case, Digest, Found

BACKENDS: dict[str, Backend | None] = {"torch": None, **cpu.BACKENDS, "triton": triton.BACKEND}


def digests_of(model: Any, spec: str, retention: Retention, backend: Backend | None) -> Found:
    torch.manual_seed(2)
    engine = Engine(codec_of(model, spec), softcap=4.0, retention=retention, backend=backend)
    read, held = Digest(), Digest()
    for step in (*STEPS[: 6 if backend is triton.BACKEND else 20], {0: 3, 1: 2, 2: 1}):
        read.add("out", engine.run(step)[1])
    held.add("pages", engine.memory)
    held.add("rings", engine.rings)
    return {"read": read.hex(), "held": held.hex()}


def cases() -> Iterator[Case]:
    small, wide = tiny("llama"), tiny("llama", head_dim=32, hidden_size=64)
    specs = [*((spec, "torch") for spec in SPECS), *product(KERNEL_SPECS, BACKENDS)]
    for (spec, name), (number, retention) in product(dict.fromkeys(specs), enumerate(KEPT)):
        if name == "triton" and (spec not in KERNEL_SPECS[:6] or number != 3):
            continue  # its interpreter is slow
        model = small if name == "torch" else wide
        find = partial(digests_of, model, spec, retention, BACKENDS[name])
        yield f"served {spec} {number} {name}", find
