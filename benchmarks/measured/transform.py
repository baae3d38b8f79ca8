"""Tables of transform coding."""

import math
from collections.abc import Callable

from .common import Row, code, markdown, rows, table
from .quality import texts


@table
def transform_texts() -> str:
    return _by_text("tc")


@table
def transform_keys_first() -> str:
    return _by_text("tc-keys-first")


def _by_text(start: str) -> str:
    """Of the results files that begin so, one for each text."""
    names = {"WikiText-2": "wikitext2", "C4": "c4", "Python source": "code"}
    return texts(**{text: f"{start}-{name}-smollm2" for text, name in names.items()})


@table
def transform_rest() -> str:
    """A line a method, KL and the same token for each text."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows("at-rest"):
        found.setdefault(row["method"], {})[row["text"]] = row
    names = list(dict.fromkeys(row["text"] for row in rows("at-rest")))
    head = ["method", "bits per value"]
    head += [f"{name}, {column}" for name in names for column in ("KL", "same token")]
    body = []
    for method, own in found.items():
        cells = [code(method), f"{own[names[0]]['bits_per_value']:.2f}"]
        for name in names:
            cells += [f"{own[name]['kl']:.5f}", f"{own[name]['same_token']:.1%}"]
        body.append(cells)
    return markdown(head, body)


@table
def transform_long() -> str:
    return texts(**{"2,048": "tc-moby-2048-smollm2", "6,000": "tc-moby-6000-smollm2"})


@table
def trellis() -> str:
    """Mean squared errors of codes for normal numbers."""
    head = ["bits", "plain codes", "codes of `tc`", "least possible", "worth, bits"]
    head += ["sealed, ns a number", "decoded, ns a number"]
    body = []
    for row in rows("trellis"):
        plain = row["plain"]
        body.append(
            [
                f"{row['bits']:g}",
                f"{plain:.3g}" if plain else "",
                f"{row['error']:.3g}",
                f"{4 ** -row['bits']:.3g}",
                f"{math.log(plain / row['error'], 4):.2f}" if plain else "",
                f"{row['seal_ns']:.0f}",
                f"{row['read_ns']:.1f}",
            ]
        )
    return markdown(head, body)


@table
def transform_options() -> str:
    return texts(**{"WikiText-2": "tc-options-smollm2"})


@table
def transform_families() -> str:
    """A line a family: of full and its standard error, then KL, then bits per value; empty where a method
    refused."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows("families"):
        found.setdefault(row["family"], {})[row["method"]] = row
    methods = [method for method in next(iter(found.values())) if method != "full"]
    shown: dict[str, Callable[[Row], str]] = {
        "of full": lambda row: f"{row['ratio']:.4f} ± {row['ratio'] * row['difference_error']:.4f}",
        "KL": lambda row: f"{row['kl']:.5f}",
        "bits per value": lambda row: f"{row['bits_per_value']:.2f}",
    }
    made = []
    for name, cell in shown.items():
        body = []
        for family, own in found.items():
            cells = (cell(own[m]) if "ratio" in own[m] else "" for m in methods)
            body.append([family, f"{own['full']['perplexity']:.2f}", *cells])
        made.append(markdown([name, "perplexity, full", *map(code, methods)], body))
    return "\n".join(made)
