"""Tables of caches at rest: bytes, and the time to pack and unpack."""

import statistics

from .common import Row, code, markdown, rows, table


@table
def saved() -> str:
    """A prompt's cache on disk, and the time until one can go on from it."""
    kinds = {"file": "", "entropy": ', `pack="entropy"`', "PrefixStore": ", in a `PrefixStore`"}
    body = []
    for row in rows("saved-smollm2"):
        read, ready = (statistics.median(row[f"{what}_seconds"]) for what in ("prefill", "ready"))
        megabytes = f"{row['file_bytes'] / 1e6:.1f} MB"
        over = f"{row['file_over_cache'] - 1:+.2%}"
        times = [f"{read:.0f} s", f"{ready:.2f} s", f"{row['times_faster']:.0f}"]
        kept = code(row["method"]) + kinds[row["kept"]]
        body.append([kept, megabytes, f"{row['file_over_fp16']:.1%}", over, *times])
    head = ["saved as", "on disk", "of an fp16 cache", "over the cache", "read the prompt"]
    return markdown([*head, "ready with `kivi-4bit`", "times faster"], body)


@table
def entropy() -> str:
    """What entropy coding takes off a saved cache."""
    found = rows("entropy-smollm2")
    body = []
    for method in dict.fromkeys(row["method"] for row in found):
        own = {row["dtype"]: row for row in found if row["method"] == method}
        one = own["float32"]
        gains = [f"{row['saved']:.1%}" for row in own.values()]
        rates = [f"{one[name]:.0f}" for name in ("code_rate", "decode_rate")]
        body.append([code(method), f"{one['plain_bytes'] / 1e6:.1f} MB", *gains, *rates])
    head = ["method", "file", "smaller by", "with a bf16 model", "coded, MB/s", "decoded, MB/s"]
    return markdown(head, body)


@table
def hybrid_store() -> str:
    """A hybrid's prompt in a `PrefixStore`, by tokens between two checkpoints: MB, and of bf16."""
    found = rows("hybrid-store")
    every = sorted({row["every"] for row in found})
    body = []
    for method in dict.fromkeys(row["method"] for row in found):
        for bits in (16, 8):
            own = {r["every"]: r for r in found if (r["method"], r["state_bits"]) == (method, bits)}
            sizes = [_size(own[n]) for n in every]
            chunks = f"{own[every[0]]['chunk_bytes'] / 1e6:.0f}"
            body.append([code(method), str(bits), chunks, *sizes])
    return markdown(["method", "`state_bits`", "without checkpoints", *(f"every {n:,}" for n in every)], body)


@table
def packing() -> str:
    """Tokens a second on one core, by the path to what is stored."""
    found = {(row["method"], row["path"], row["what"]): row for row in rows("packing")}
    ways = list(dict.fromkeys(key[1:] for key in found))
    body = []
    for method in dict.fromkeys(method for method, _, _ in found):
        rates = (found[method, *way]["tokens_per_second"] for way in ways)
        body.append([code(method), *(f"{rate:,.0f}" for rate in rates)])
    return markdown(["method", *(": ".join(way) for way in ways)], body)


def _size(row: Row) -> str:
    return f"{row['bytes'] / 1e6:.0f} ({row['bytes'] / row['bf16_bytes']:.0%})"
