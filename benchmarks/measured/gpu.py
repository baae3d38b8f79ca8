"""Tables of what a GPU measured, by `benchmarks/gpu.py`."""

from .common import code, markdown, rows, table


@table
def gpu_attention() -> str:
    """Attention of a decoding step at Llama 3.1 8B's shape, beside torch's fastest in bf16."""
    found = rows("gpu/attention")
    full = {(row["context"], row["batch"]): row for row in found if row["method"] == "full"}
    body = []
    for row in found:
        best = full[row["context"], row["batch"]]
        kernel = row["kernel"].split(" (")[0]
        times = best["attention_ms_per_layer"] / row["attention_ms_per_layer"]
        body.append(
            [
                f"{row['context']:,}, {row['batch']}",
                code(row["method"]) if row is not best else "bf16",
                kernel,
                f"{1e3 * row['attention_ms_per_layer']:.0f}",
                f"{times:.2f}",
                f"{row['cache_bytes'] / best['cache_bytes']:.2f}",
            ]
        )
    head = ["tokens, sequences", "cache", "kernel", "µs a layer", "times bf16", "of its bytes"]
    return markdown(head, body)


@table
def gpu_others() -> str:
    """Attention of a decoding step by methods that rebuild keys and values, or keep outliers."""
    body = []
    for row in rows("gpu/others"):
        name = "bf16" if row["method"] == "full" else code(row["method"])
        taken = f"{1e3 * row['attention_ms_per_layer']:,.0f}"
        times = f"{row['speedup_vs_full']:.2f}"
        body.append([f"{row['context']:,}, {row['batch']}", name, taken, times])
    return markdown(["tokens, sequences", "cache", "µs a layer", "times bf16"], body)


@table
def gpu_largest() -> str:
    """Whole decoding steps with as many sequences as one GPU holds."""
    body = []
    for row in rows("gpu/largest"):
        name = "bf16" if row["method"] == "full" else code(row["method"])
        numbers = [f"{row[of]:,.0f}" for of in ("context", "batch", "tokens_per_second")]
        times = f"{row['times_full']:.2f}"
        body.append([name, *numbers, times, f"{row['cache_bytes'] / 1e9:.0f} GB"])
    head = ["cache", "tokens", "sequences", "tokens a second", "times bf16", "memory of the cache"]
    return markdown(head, body)


@table
def gpu_steps() -> str:
    """Whole decoding steps of a random-weight Llama 3.1 8B in memory of a fixed size."""
    body = []
    for row in rows("gpu/steps"):
        if row["failed"]:
            continue
        name = "transformers' `StaticCache`" if row["method"] == "full static" else code(row["method"])
        way = "compiled, recorded as CUDA graphs" if row["compiled"] else "as they are"
        body.append([name, way, f"{row['ms_per_token']:.1f}", f"{row['peak_bytes'] / 1e9:.1f} GB"])
    return markdown(["cache", "steps", "ms a step", "most memory"], body)
