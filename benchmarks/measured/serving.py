"""Tables of serving in vLLM: how much fits, how fast it is, and what it costs."""

from .common import code, markdown, rows, table

OWN = {"stock": "vLLM as it is", "stock-fp8": "vLLM's own fp8"}


def contender(spec: str) -> str:
    return OWN.get(spec, code(spec))


@table
def serving_capacity() -> str:
    """Tokens that the same memory has room for."""
    return markdown(
        ["cache", "tokens", "times as many"],
        (
            [contender(row["spec"]), f"{row['tokens']:,}", f"{row['times']:.2f}"]
            for row in rows("serving-capacity")
        ),
    )


@table
def serving_speed() -> str:
    """Tokens a second, and in brackets over those of vLLM as it is."""
    body = []
    for row in rows("serving-speed"):
        speeds = (f"{row[of]:.1f} ({row['times'][of]:.2f})" for of in ("prefill", "decode", "whole"))
        body.append([contender(row["spec"]), *speeds])
    return markdown(["cache", "prompts", "answers", "whole load"], body)


@table
def serving_quality() -> str:
    """Perplexity by vLLM and by the library, with what each gives from reading to reading."""
    body = []
    for row in rows("serving-quality"):
        sides = (("perplexity", "spread"), ("library", "library_spread"))
        read = (f"{row[value]:.2f} ± {100 * row[spread]:.1f}%" for value, spread in sides)
        ratio = f"{row['ratio']:.3f} ± {row['ratio_error']:.3f}"
        body.append([contender(row["method"]), *read, ratio])
    return markdown(["cache", "in vLLM", "in the library", "ratio"], body)


@table
def serving_store() -> str:
    """What the connector stores, and how likely a text is after it."""
    found = rows("serving-store")
    (own,) = (row for row in found if row["method"] == "none")
    body = []
    for row in found:
        stored = row is not own
        hits = f"{row['hits'][-1]:,.0f} of {row['asked']:,}" if stored else "-"
        fewer = f"{row['times_fewer']:.1f}" if stored else "-"
        ratio = f"{row['perplexity'] / own['perplexity']:.3f}"
        name = code(row["method"]) if stored else "nothing"
        body.append([name, hits, fewer, f"{row['perplexity']:.2f}", ratio])
    head = ["stored by", "tokens found", "times fewer bytes than bf16", "perplexity", "ratio"]
    return markdown(head, body)


@table
def across_machines() -> str:
    """What LMCache's second tier keeps by each serde, and how a second engine goes on from it."""
    return _by_serde("across-machines")


@table
def across_machines_sdk() -> str:
    """The same of states that plain transformers gives to LMCache's SDK."""
    return _by_serde("across-machines-sdk")


def _by_serde(name: str) -> str:
    found = rows(name)
    body = []
    for row in found:
        if row["serde"] == "engine":
            continue
        serde = row["serde"] if row["serde"] in ("none", "fp8") else code(row["serde"])
        errors = [f"{row[name]:.3f}" if name in row else "" for name in ("key_error", "value_error")]
        size = f"{row['bytes'] / 1e6:.1f} MB", f"{row['bf16_bytes'] / row['bytes']:.1f}"
        hits = f"{row['hits'][-1] / row['asked']:.0%}"
        body.append([serde, *size, hits, *errors, f"{row['same_tokens'][-1]} of {row['tokens']}"])
    head = ["serde", "in the folder", "times fewer than bf16", "tokens found", "error of keys", "of values"]
    return markdown([*head, "greedy tokens that are the same"], body)
