"""The device, with models that several stages share."""

from functools import cache, cached_property
from typing import Any

import torch

from xquant import parse_method
from xquant.methods import Method
from xquant_lab.bench import capacity, shaped
from xquant_lab.bench.ceilings import Ceilings, ceilings
from xquant_lab.bench.clocks import Clock, GraphClock, HostClock, Job
from xquant_lab.bench.contenders import Models

from .plan import Sizes, sized

Row = dict[str, Any]


class Machine:
    """Makes what stages measure."""

    def __init__(self, device: str, sizes: Sizes) -> None:
        self.device, self.sizes = torch.device(device), sizes
        self.dtype = torch.bfloat16
        self.shaped = cache(self._shaped)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @cached_property
    def limits(self) -> Ceilings:
        """Of a GPU; what stands for them in a rehearsal was not measured."""
        return ceilings(self.device) if self.on_gpu else Ceilings(copy=1e9, multiply=1e9)

    def method(self, spec: str) -> Method:
        return parse_method(sized(spec, self.sizes.blocks))

    def _shaped(self, layers: int) -> Models:
        return Models(shaped.shaped_model(self.sizes.shape, layers, self.device, self.dtype))

    @cached_property
    def whole(self) -> Models:
        """All layers of the shape."""
        return Models(shaped.whole_model(self.sizes.shape, self.device, self.dtype))

    def clock(self, job: Job) -> Clock:
        """Of attention alone."""
        return (GraphClock if self.on_gpu else HostClock)(job, self.device)

    def peak(self) -> int | None:
        """The most bytes that tensors took since `fresh`."""
        return torch.cuda.max_memory_allocated(self.device) if self.on_gpu else None

    def fresh(self) -> None:
        """Give back what nothing refers to, and count memory anew."""
        capacity.release()
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
