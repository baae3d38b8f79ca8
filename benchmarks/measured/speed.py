"""Tables of time and memory."""

from xquant.catalogue import USUAL

from .common import Row, by_method, code, markdown, rows, table


@table
def decode() -> str:
    """Of SmolLM2, by context: how many times faster than the full cache each method is."""
    methods = ("kivi-4bit", "kivi-2bit", "xquant-4bit", "xquant-cl-2bit")
    body = []
    for name in ("512", "2k", "8k", "32k"):
        found = by_method(f"bench-smollm2-{name}")
        full = found["full"]
        times = (f"{found[m]['speedup_vs_full']:.2f}" if m in found else "" for m in methods)
        body.append([f"{full['context']:,}", f"{full['ms_per_token']:.0f} ms", *times])
    return markdown(["context", "full cache", *map(code, methods)], body)


@table
def front() -> str:
    """SmolLM2 on two threads: a token of what is recommended for decoding, beside the strongest others."""
    contexts = ("2k", "8k", "32k")
    plain, stored = (
        [by_method(f"{name}-{each}") for each in contexts] for name in ("bench-smollm2", "step-peers")
    )
    lines = (
        ("full cache, the fastest of transformers' settings", "full", plain),
        (f"{code(USUAL)}", USUAL, plain),
        ("full cache, weights in 4 bits, compiled", "full", stored),
        (f"{code(USUAL)}, weights in 4 bits, compiled, static cache", f"{USUAL} static", stored),
        ("llama.cpp, f16 cache, weights in 4 bits", "llama.cpp-f16", stored),
        ("OpenVINO GenAI, f16 cache, weights in 4 bits", "openvino-f16", stored),
    )
    body = [
        [name, *(f"{found[row]['ms_per_token']:.0f}" if row in found else "" for found in times)]
        for name, row, times in lines
    ]
    first, *others = (f"{found['full']['context']:,}" for found in plain)
    return markdown(["ms a token", f"{first} tokens", *others], body)


@table
def steps() -> str:
    """Of SmolLM2 at 512 tokens: a step by how it is run, of the full cache with the faster attention."""
    found = by_method("bench-step-smollm2-512")
    full, ways = found.pop("full"), {}
    for label, ms in full["tried"].items():
        way = " ".join(label.split()[2:])
        ways[way] = min(ms, ways.get(way, ms))
    names = {"": "as it is", "compiled": "compiled", "packed": "packed weights"}
    names["packed compiled"] = "packed weights, compiled"
    body = [["full cache", names[way], f"{ms:.1f}"] for way, ms in ways.items()]
    for method, row in found.items():
        body.append([code(method), names["packed compiled"], f"{row['ms_per_token']:.1f}"])
    return markdown(["cache", "the model", "ms a step"], body)


@table
def peers() -> str:
    """Of SmolLM2: the caches of the run at 32K, and what they take at each context."""
    return _beside(**{"2K": "bench-smollm2-2k", "8K": "bench-smollm2-8k", "32K": "bench-smollm2-32k"})


@table
def peers_packed() -> str:
    """The same with packed weights, of the full cache too."""
    return _beside(**{"8K": "bench-packed-peers-8k", "32K": "bench-packed-peers-32k"})


@table
def peers_compiled() -> str:
    """The same where models are compiled, too."""
    return _beside(**{"8K": "bench-compiled-peers-8k"})


@table
def compiled_32k() -> str:
    """SmolLM2 at 32,768 tokens, packed weights, compiled."""
    head = ["cache", "ms a token", "times full"]
    body = [
        [code(m), f"{row['ms_per_token']:.0f}", f"{row['speedup_vs_full']:.2f}"]
        for m, row in by_method("bench-compiled-smollm2-32k").items()
    ]
    return markdown(head, body)


@table
def peers_4_bits() -> str:
    """The same where all have the packaged file's weights in 4 bits, in bf16, compiled, on two CPUs."""
    files = {n: f"step-peers-{n.lower()}" for n in ("2K", "8K", "32K")}
    return _beside(**files, **{f"{n}, AVX2": f"{file}-avx2" for n, file in files.items()})


@table
def peers_ratios() -> str:
    """How many times as fast a static cache of ours is as the best of each engine, of the same results."""
    contexts = ("2K", "8K", "32K")
    body = []
    for kind, end in (("", ""), (", AVX2", "-avx2")):
        found = [by_method(f"step-peers-{n.lower()}{end}") for n in contexts]
        for engine in ("llama.cpp", "openvino", "onnxruntime"):
            cells = []
            for each in found:
                times = [row["ms_per_token"] for name, row in each.items() if name.startswith(engine)]
                own = each["kivi-4bit static"]["ms_per_token"]
                cells.append(f"{min(times) / own:.2f}" if times else "")
            if any(cells):
                body.append([code(engine) + kind, *cells])
    return markdown(["the best of", *contexts], body)


def _beside(**files: str) -> str:
    found = [by_method(file) for file in files.values()]
    first, *others = files
    body = []
    for method, row in found[-1].items():
        size = f"{row['cache_bytes'] / 1e6:.0f}" if row["cache_bytes"] else ""
        body.append([code(method), *(_a_token(one.get(method)) for one in found), size])
    head = ["cache", f"{first}, ms a token", *others]
    return markdown([*head, f"{list(files)[-1]}, MB"], body)


def _a_token(row: Row | None) -> str:
    """Milliseconds; of a peer that was dropped those of its warm-up."""
    if row is None:
        return ""
    if row.get("dropped"):
        return f"dropped at {min(row['tried'].values()):,.0f}"
    return f"{row['ms_per_token']:.0f}"


@table
def attention() -> str:
    """Of one layer of Llama-3.1-8B's shape."""
    short, long = by_method("bench-llama-8k"), by_method("bench-llama-32k")
    body = []
    for method in short:
        cells = [code(method)]
        for row in (short[method], long.get(method)):
            cells += ["", "", ""] if row is None else _one_layer(row)
        body.append(cells)
    head = ["cache", *(f"{n}, {c}" for n in ("8K", "32K") for c in ("ms", "times", "MB a layer"))]
    return markdown(head, body)


def _one_layer(row: Row) -> list[str]:
    times, size = f"{row['speedup_vs_full']:.1f}", f"{row['cache_bytes'] / 8e6:.0f}"
    return [f"{row['attention_ms_per_layer']:.2f}", times, size]


@table
def transform_decode() -> str:
    return _by_context("bench-tc-smollm2", **{"2,048": "2k", "8,192": "8k", "32,768": "32k"})


@table
def transform_packed() -> str:
    """The same with packed weights."""
    return _by_context("bench-packed-smollm2", **{"8,192": "8k", "32,768": "32k"})


def _by_context(files: str, **contexts: str) -> str:
    """Decoding by method and context; the results of each context are in ``files`` and its short name."""
    runs = [by_method(f"{files}-{name}") for name in contexts.values()]
    body = []
    for method in runs[0]:
        cells = [code(method)]
        for row in (run.get(method) for run in runs):
            cells += [f"{row['ms_per_token']:.0f}", f"{row['speedup_vs_full']:.2f}"] if row else ["", ""]
            cells += [f"{row['cache_bytes'] / 1e6:.1f}" if row else ""]
        body.append(cells)
    head = [f"{n}: {c}" for n in contexts for c in ("ms a token", "times full", "MB")]
    return markdown(["cache", *(name.replace(": times", " times") for name in head)], body)


@table
def ranked_attention() -> str:
    """Of one layer with ranked codes (`tc`), beside the product that rebuilds its keys alone."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows("ranked-attention"):
        found.setdefault((row["shape"], row["tokens"]), {})[row["what"]] = row["milliseconds"]
    kernels = ("avx512", "avx2", "folded")
    body = []
    for (shape, tokens), times in found.items():
        products = [name for name in times if name not in kernels]
        coded, all_channels = (name.split()[2] for name in products)
        shown = (times[name] for name in (*kernels, *products))
        cells = (f"{each:.0f} ms" if each >= 10 else f"{each:.1f} ms" for each in shown)
        body.append([f"{shape}, {tokens:,}", f"{all_channels}, {coded}", *cells])
    head = ["shape, tokens", "`C`, of them coded", *map(code, kernels)]
    return markdown([*head, "product, coded", "product, all"], body)


@table
def prompts() -> str:
    """Of SmolLM2: what a prompt takes of the full cache's time, and a chunk over a long past."""
    every, half, past = (rows(name) for name in ("prefill", "prefill-bf16", "prefill-past"))
    timed = (every, 512), (every, 2048), (half, 2048), (past, 512)
    body = []
    for method in dict.fromkeys(row["method"] for row in every):
        name = "full cache" if method == "DynamicCache" else code(method)
        own = [_prompt(found, method, tokens) for found, tokens in timed]
        times = [f"{row['ratio_to_dynamic_cache']:.2f}" for row in own]
        body.append([name, *times, f"{own[-1]['peak_mb']:,.0f}"])
    head = ["tokens", "512, fp32", "2,048, fp32", "2,048, bf16", "512 after 16,384, fp32"]
    return markdown([*head, "peak, MB"], body)


@table
def prompts_avx2() -> str:
    """The same in fp32 on a CPU without AVX-512, before and after codebooks were sealed natively and chunks
    had an attention of their own."""
    body = []
    for name, what, tokens in ("prefill", "2,048 tokens", 2048), ("prefill-past", "512 after 16,384", 512):
        before, after = (rows(f"{name}-avx2-{when}") for when in ("before", "after"))
        for method in dict.fromkeys(row["method"] for row in after if row["method"] != "DynamicCache"):
            cells = [code(method), what]
            for found in before, after:
                cells.append(_ratio(_prompt(found, method, tokens)))
            body.append(cells)
    return markdown(["cache", "read", "before", "after"], body)


@table
def prompts_by_kernel() -> str:
    """The same since the library reads prompts."""
    every, half = rows("prefill-kernel"), rows("prefill-kernel-bf16")
    timed = (every, 512), (every, 2048), (half, 512), (half, 2048)
    body = []
    for method in dict.fromkeys(row["method"] for row in every if row["method"] != "DynamicCache"):
        cells = [code(method)]
        for found, tokens in timed:
            cells.append(_ratio(_prompt(found, method, tokens)))
        body.append(cells)
    return markdown(["cache", "512, fp32", "2,048, fp32", "512, bf16", "2,048, bf16"], body)


def _ratio(row: Row) -> str:
    low, high = row["ratio_min_max"]
    return f"{row['ratio_to_dynamic_cache']:.2f} ({low:.2f} to {high:.2f})"


def _prompt(found: list[Row], method: str, tokens: int) -> Row:
    return next(row for row in found if (row["method"], row["tokens"]) == (method, tokens))


@table
def answers() -> str:
    """16 sequences at two contexts, with blocks of their own or shared."""
    short, long = ({row["way"]: row for row in rows(f"answers-{n}")} for n in ("4k", "8k"))
    tried = long["full"]["tried"]
    names = {
        "full": f"full cache, {min(tried, key=tried.get)}",
        "apart": "`kivi-4bit`, blocks of their own",
        "together": "`kivi-4bit`, blocks of one prompt shared",
        "padded": "`kivi-4bit`, padded to one length",
    }
    body = []
    for way, name in names.items():
        cells = [name]
        for row in (short[way], long[way]):
            cells += [f"{row['ms_per_step']:.0f}", f"{row['speedup_vs_full']:.1f}"]
        body.append(cells)
    head = [f"{n}: {c}" for n in ("4,096", "8,192") for c in ("ms a step", "times full")]
    return markdown(["cache", *head], body)


@table
def peak_memory() -> str:
    body = ([code(row["method"]), f"{row['peak_mb']:.0f}"] for row in rows("peak-memory"))
    return markdown(["cache", "MB"], body)


@table
def folded() -> str:
    """Of one layer of Llama-3.1-8B's shape, attention by the kernel `folded` and by the reference."""
    found, reference = by_method("bench-folded-8k"), by_method("bench-reference-8k")
    body = []
    for method, row in found.items():
        if "folded" in row["kernel"]:
            times = (one[method]["attention_ms_per_layer"] for one in (found, reference))
            body.append([code(method), row["dtype"], *(f"{ms:.0f} ms" for ms in times)])
    return markdown(["method", "dtype", "`folded`", "`reference`"], body)


@table
def latent() -> str:
    """A decoding step over latents at the shape of DeepSeek-V3."""
    found = by_method("latent")
    own, torchs = found["transformers"], found["full"]
    head = ("cache", "ms a step", "attention alone", "of `full`'s", "MB", "of its bytes")
    body = []
    for row in found.values():
        alone = row["attention_ms"]
        body.append(
            [
                "transformers' own" if row is own else code(row["method"]),
                f"{row['ms_per_step']:,.0f}",
                "" if alone is None else f"{alone:.0f}",
                "" if alone is None else f"{alone / torchs['attention_ms']:.2f}",
                f"{row['cache_bytes'] / 1e6:.1f}",
                f"{row['cache_bytes'] / own['cache_bytes']:.3f}",
            ]
        )
    return markdown(head, body)


@table
def latent_coded() -> str:
    """What coded latents lose, of a small model that was trained for it."""
    body = (
        [
            code(row["method"]),
            row["calibrated"],
            f"{row['bits_per_value']:.2f}",
            f"{row['kl']:.6f}",
            f"{row['ratio']:.4f}",
        ]
        for row in rows("latent-coded")
        if row["method"] != "full"
    )
    return markdown(["cache", "calibrated on", "bits a value", "KL", "times the perplexity"], body)


@table
def rope() -> str:
    """Attention over packed keys before RoPE, by how heads turn."""
    head = ("RoPE", "method, tokens", "kernel", "ms a step of 8 layers", "of halves")
    body = (
        [
            row["turns"],
            f"{code(row['method'])}, {row['tokens']:,}",
            row["kernel"],
            f"{row['ms']:.2f}",
            f"{row['of_halves']:.2f}",
        ]
        for row in rows("rope")
    )
    return markdown(head, body)


@table
def heads() -> str:
    """Attention over packed keys and values, by the size of a head."""
    found = {(row["method"], row["head_size"]): row for row in rows("heads")}
    methods = list(dict.fromkeys(method for method, _ in found))
    sizes = sorted({size for _, size in found if size % 32})
    head = ("method", "ms at 64", *(str(size) for size in sizes), "of the full cache, at 80")
    body = (
        [
            code(method),
            f"{found[method, 64]['ms']:.2f}",
            *(f"{found[method, size]['of_next_32']:.2f}" for size in sizes),
            f"{found[method, 80]['of_full']:.2f}",
        ]
        for method in methods
    )
    return markdown(head, body)


@table
def instructions() -> str:
    """What Triton's kernels are compiled to, before and now."""
    earlier = {row["kernel"]: row for row in rows("triton-instructions-before")}
    head = (
        *("kernel", "registers", "spills in the loop", "shared memory, KB", "programs an SM"),
        *("instructions an element", "of fp16, H100", "of fp16, H200"),
    )

    def cells(row: Row) -> list[str]:
        return [
            *(str(row[name]) for name in ("registers", "spills_in_loop")),
            f"{row['shared_bytes'] / 1024:.0f}",
            str(row["programs_an_sm"]),
            f"{row['instructions_an_element']:.1f}",
            *(f"{row[f'of_fp16_{gpu}']:.2f}" for gpu in ("h100", "h200")),
        ]

    body = []
    for row in rows("triton-instructions"):
        pairs = zip(cells(earlier[row["kernel"]]), cells(row), strict=True)
        kernel, _, method = row["kernel"].partition(", ")
        method, _, pages = method.partition(", ")
        name = f"`{kernel}`, {code(method)}" + (f", {pages}" if pages else "")
        body.append([name, *(now if was == now else f"{was} → {now}" for was, now in pairs)])
    return markdown(head, body)
