"""Whole decoding steps, as they are and compiled with ``mode="reduce-overhead"``: a `StaticKVCache` beside
transformers' own `StaticCache`."""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch._dynamo.utils import counters
from transformers import StaticCache

from xquant_lab.bench.clocks import HostClock, reason
from xquant_lab.bench.contenders import Contender, Static, head_sizes

from .machine import Machine, Row
from .plan import Size

METHODS = ("kivi-4bit", "kivi-4bit:rope=post")
WARM_UP = 4
"""Steps that compile, record and replay."""


class FixedFull(Contender):
    """transformers' cache in memory of a fixed size, with random states in the place of a prompt's."""

    name = "full static"
    setting = "sdpa"
    alone = False

    def __init__(self, model: Any, size: Size, room: int, dtype: torch.dtype) -> None:
        context, self._batch = size
        self.model, self.dtype = model, dtype
        self.cache = StaticCache(config=model.config, max_cache_len=context + room)
        _, heads, width = head_sizes(model)
        self.cache.early_initialization(self._batch, heads, width, dtype, model.device)
        for layer in self.cache.layers:
            for states in (layer.keys, layer.values):
                states[:, :, :context].normal_()
            layer.cumulative_length.fill_(context)

    @property
    def cache_bytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)

    def attend(self) -> None:
        raise NotImplementedError(f"{self.name} attends in whole steps alone")


@torch.no_grad()
def steps(machine: Machine) -> Iterator[list[Row]]:
    """A row for each cache, as it is and compiled. They are there one at a time, so that the most memory is
    that of one."""
    size, count = machine.sizes.steps, WARM_UP + 2 * machine.sizes.rounds
    models, dtype = machine.whole, machine.dtype
    makers: dict[str, Callable[[], Contender]] = {
        FixedFull.name: lambda: FixedFull(models.plain(dtype), size, count, dtype)
    }
    for spec in METHODS:
        method = machine.method(spec)
        own = models.attached(dtype), method, size, count, None, "auto"
        makers[f"{method.spec} static"] = partial(Static, *own)
    for compiled in (False, True):
        full = None
        for name, make in makers.items():
            taken = _measured(machine, make, compiled)
            own_time = taken["ms_per_token"]
            full = own_time if name == FixedFull.name else full
            ratio = full / own_time if full and own_time else None
            sizes = {"context": size[0], "batch": size[1], "compiled": compiled}
            yield [{"method": name, **sizes, **taken, "speedup_vs_full": ratio}]


def _measured(machine: Machine, make: Callable[[], Contender], compiled: bool) -> Row:
    fields = ("kernel", "ms_per_token", "first_seconds", "cache_bytes", "peak_bytes", "failed")
    row: Row = dict.fromkeys(fields)
    torch.compiler.reset()  # a graph that was recorded holds the cache of before
    machine.fresh()
    counters.clear()
    try:
        contender = make()
        if compiled:
            how = {"mode": "reduce-overhead"} if machine.on_gpu else {"backend": "eager"}
            contender.prepare(packed=False, compiled=True, dynamic=False, **how)
        clock = HostClock(contender.step, machine.device)
        start = time.perf_counter()
        clock()
        row["first_seconds"] = time.perf_counter() - start
        for _ in range(WARM_UP // 2 - 1):
            clock()
        taken = [clock() * 1e3 for _ in range(machine.sizes.rounds)]
        row |= {"kernel": contender.setting, "cache_bytes": contender.cache_bytes}
        row |= {"ms_per_token": statistics.median(taken), "ms_min_max": [min(taken), max(taken)]}
        row |= {"peak_bytes": machine.peak(), "unrecorded": counters["inductor"]["cudagraph_skips"]}
    except Exception as error:  # memory may run out, and a compiler may refuse
        row["failed"] = reason(error)
    return row
