"""What a connector did, in the way of vLLM's own connectors: in its log, and at ``/metrics``."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

COUNTED = {
    "blocks_stored": "Blocks that were written to the folder.",
    "blocks_left_out": "Blocks that were not: the limit was reached, or the disk failed.",
    "blocks_loaded": "Blocks that were read into pages.",
    "blocks_missed": "Whole blocks of prompts that were neither in vLLM's memory nor, whole, in the folder.",
    "blocks_damaged": "Files that were found damaged, and removed.",
    "bytes_stored": "Bytes of the blocks that were written.",
    "bytes_loaded": "Bytes of the blocks that were read.",
    "pack_seconds": "Time in which blocks were packed.",
    "unpack_seconds": "Time in which blocks were unpacked.",
}
"""By name, what is counted; with tensor parallelism each shard's part of a block is a block."""
ROOM = "room_bytes"
"""The name of what is no count: bytes that were left of the folder's limit when it was last written to."""


class Counts(KVConnectorStats):
    """How much of each of `COUNTED` since the last time that vLLM asked, and the newest `ROOM`."""

    data: dict[str, float]

    def add(self, name: str, count: float) -> None:
        """To what was counted of one of `COUNTED`."""
        if count:
            self.data[name] = self.data.get(name, 0) + count

    def set_room(self, nbytes: int) -> None:
        """To what is left of the folder's limit now."""
        self.data[ROOM] = nbytes

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Add the seconds until its end."""
        start = time.perf_counter()
        yield
        self.add(name, time.perf_counter() - start)

    def taken(self) -> "Counts | None":
        """These, which begin anew; None where nothing was counted."""
        if self.is_empty():
            return None
        found = Counts(self.data)
        self.reset()
        return found

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "Counts":
        for name, count in other.data.items():
            if name == ROOM:
                self.data[name] = count
            else:
                self.add(name, count)
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(count, 3) for name, count in self.data.items()}

    def is_empty(self) -> bool:
        return not self.data


class Metrics(KVConnectorPromMetrics):
    """A counter for each of `COUNTED`, and a gauge for `ROOM`, as ``vllm:xquant_NAME``."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def of_engines(kind: Any, name: str, says: str) -> dict[int, Any]:
            metric = kind(name=f"vllm:xquant_{name}", documentation=says, labelnames=labelnames)
            return create_metric_per_engine(metric, per_engine_labelvalues)

        self._counters = {name: of_engines(self._counter_cls, name, says) for name, says in COUNTED.items()}
        self._room = of_engines(self._gauge_cls, ROOM, "Bytes that are left of the folder's limit.")

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            if name == ROOM:
                self._room[engine_idx].set(count)
            else:
                self._counters[name][engine_idx].inc(count)
