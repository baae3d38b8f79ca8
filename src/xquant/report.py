"""What a cache holds, in bytes, and what that is worth."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Report:
    """Bytes resident in a cache, by what they are.

    ``bits_per_value`` counts sealed blocks with the tables they need (codebooks, offline scales) and
    their sinks over the key and value elements of the sealed tokens, ``code_bits`` the codes alone (the
    papers' equivalent bit-width); ``cache_ratio`` counts everything over the fp16 cache of the same
    model. These leave out layers that are not compressed; ``cache_bytes`` and ``full_cache_bytes`` do
    not.
    """

    method: str
    batch: int
    tokens: int
    kernel: str
    layers_compressed: list[int]
    layers_skipped: dict[int, str]
    sealed_bytes: dict[str, int]
    table_bytes: int
    sink_bytes: int
    tail_bytes: int
    index_bytes: int
    skipped_bytes: int
    cache_bytes: int
    full_cache_bytes: int
    bits_per_value: float
    code_bits: float
    cache_ratio: float
    model_bytes: int
    codec_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return {
            **asdict(self),
            "layers_skipped": {str(k): v for k, v in self.layers_skipped.items()},
        }

    def __str__(self) -> str:
        parts = {**self.sealed_bytes, "tables": self.table_bytes, "sinks": self.sink_bytes}
        parts |= {"tail": self.tail_bytes, "index": self.index_bytes}
        parts |= {"layers not compressed": self.skipped_bytes}
        held = ", ".join(f"{name} {_size(size)}" for name, size in parts.items() if size)
        lines = [
            f"{self.method}: {self.tokens} tokens x {self.batch}, kernel {self.kernel}",
            f"  resident      {_size(self.cache_bytes)} ({held or 'nothing yet'})",
            f"  fp16 cache    {_size(self.full_cache_bytes)}; ratio {self.cache_ratio:.3f},"
            f" {self.bits_per_value:.2f} bits per value in sealed blocks, {self.code_bits:.2f} in codes",
            f"  model weights {_size(self.model_bytes)}; the method's own {_size(self.codec_bytes)}",
            f"  layers        {len(self.layers_compressed)} compressed",
        ]
        reasons: dict[str, int] = {}
        for reason in self.layers_skipped.values():
            reasons[reason] = reasons.get(reason, 0) + 1
        lines += [f"                {count} not: {reason}" for reason, count in reasons.items()]
        return "\n".join(lines)


def _size(size: float) -> str:
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"
