"""What a cache holds, in bytes, and what that is worth."""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from .. import compat
from ..linear import packed_bytes
from ..sizes import readable
from .contents import Contents


@dataclass(frozen=True)
class Report:
    """Bytes resident in a cache, by what they are: what `KVCache.report` returns.

    Attributes:
        method: the spec.
        batch: sequences.
        tokens: of each sequence.
        kernel: what attends over the compressed layers, and why nothing faster does.
        layers_compressed: their numbers.
        layers_skipped: the numbers of layers that are not compressed, with the reason.
        sealed_bytes: of compressed blocks, by tensor: codes, scales, zeros and so on.
        table_bytes: what all blocks share: codebooks, offline scales.
        sink_bytes: first tokens that are kept full.
        tail_bytes: newest tokens that are kept full; after a pass of a few tokens, which may be drafts, also
            those that it has sealed, until the next pass.
        index_bytes: positions, padding, ids of tokens and the block table.
        skipped_bytes: of layers that are not compressed.
        cache_bytes: all of the above.
        full_cache_bytes: of the same keys and values in fp16.
        bits_per_value: of compressed blocks, with the tables, sinks and ids that they need, over their key
            and value elements.
        code_bits: the codes alone: the papers' equivalent bit-width.
        cache_ratio: everything in the compressed layers over their fp16 cache.
        model_bytes: of the model's weights.
        codec_bytes: of weights that the method adds; they do not grow with the context.
        note: what the figures do not tell: why the model no longer uses the cache.
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
    note: str = ""
    host_bytes: int = 0
    """Of `cache_bytes`, those in host memory, where blocks are offloaded."""

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
        held = ", ".join(f"{name} {readable(size)}" for name, size in parts.items() if size)
        lines = [
            f"{self.method}: {self.tokens} tokens x {self.batch}, kernel {self.kernel}",
            *([f"  note          {self.note}"] if self.note else []),
            f"  resident      {readable(self.cache_bytes)} ({held or 'nothing yet'})",
            *([f"  in host RAM   {readable(self.host_bytes)}"] if self.host_bytes else []),
            f"  fp16 cache    {readable(self.full_cache_bytes)}; ratio {self.cache_ratio:.3f},"
            f" {self.bits_per_value:.2f} bits per value in sealed blocks, {self.code_bits:.2f} in codes",
            f"  model weights {readable(self.model_bytes)}; the method's own {readable(self.codec_bytes)}",
            f"  layers        {len(self.layers_compressed)} compressed",
        ]
        reasons: dict[str, int] = {}
        for reason in self.layers_skipped.values():
            reasons[reason] = reasons.get(reason, 0) + 1
        lines += [f"                {count} not: {reason}" for reason, count in reasons.items()]
        return "\n".join(lines)


def report_of(contents: Contents, tokens: int | None = None, kernel: str = "", note: str = "") -> Report:
    """What is resident in a cache, layer by layer kind; ``tokens`` are those that it counts within a forward
    pass."""
    view = contents.attachment.view
    sealed: Counter[str] = Counter()
    values = sealed_values = code_bytes = 0
    for layer in contents.compressed:
        per_token = layer.codec.view.state_width
        values += per_token * contents.index.batch * layer.get_seq_length()
        sealed_values += per_token * contents.index.batch * layer.stream.tokens
        for packed in layer.stream.pool:
            sealed.update({name: tensor.nbytes for name, tensor in packed.items()})
        for segment in layer.stream.segments:
            code_bytes += layer.stream.blocks * segment.parts(layer.stream.block)["codes"]
    sinks = sum(layer.sink_nbytes for layer in contents.compressed)
    tail = sum(layer.tail_nbytes for layer in contents.compressed) + contents.stack.unsealed_nbytes
    index = contents.index.nbytes + sum(layer.stream.table_nbytes for layer in contents.compressed)
    codebooks = sum(layer.stream.shared_nbytes for layer in contents.compressed)
    lowest = contents.compressed[0]
    ids = 0 if lowest.codec.embedding is None else contents.index.ids[:, : lowest.stream.tokens].nbytes
    others = [*contents.others.values(), *contents.linear_states.values()]
    held = [tensor for layer in others for tensor in compat.held_by(layer)]
    skipped = sum(tensor.nbytes for tensor in held)
    resident = sealed.total() + codebooks + sinks + tail + index

    def bits(size: int) -> float:
        return 8 * size / sealed_values if sealed_values else 0.0

    return Report(
        method=contents.method.spec,
        batch=contents.index.batch,
        tokens=contents.index.length if tokens is None else tokens,
        kernel=kernel,
        layers_compressed=[layer.codec.view.index for layer in contents.compressed],
        layers_skipped=dict(view.skipped),
        sealed_bytes=dict(sealed),
        table_bytes=codebooks,
        sink_bytes=sinks,
        tail_bytes=tail,
        index_bytes=index,
        skipped_bytes=skipped,
        cache_bytes=resident + skipped,
        full_cache_bytes=2 * (values + sum(tensor.numel() for tensor in held)),
        bits_per_value=bits(sealed.total() + codebooks + sinks + ids),
        code_bits=bits(code_bytes),
        cache_ratio=resident / (2 * values) if values else 0.0,
        model_bytes=packed_bytes(view.model) + sum(p.nbytes for p in view.model.parameters()),
        codec_bytes=sum(layer.codec.nbytes for layer in contents.compressed),
        note=note,
        host_bytes=sealed.total() if contents.stack.offloader is not None else 0,
    )
