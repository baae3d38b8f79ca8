"""Tables of rivals: through the store on three kinds of text, and as caches are used."""

from statistics import fmean, median

from .common import Row, code, error, markdown, rows, table

KEPT = {"4 sinks": "", "4 sinks, 128 recent": "128 recent: "}
"""What columns of a setting of rivals.py begin with."""


def divergence(row: Row) -> str:
    return f"{row['kl']:.5f} ± {row['kl_error']:.5f}"


def on_text(text: str) -> str:
    """A line a method, as it was asked for: its bits, and three columns for each setting of recent tokens."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows("rivals"):
        if row["text"] == text:
            found.setdefault(row["of"], {})[row["kept"]] = row
    head = ["method", "bits"]
    for begin in KEPT.values():
        head += [f"{begin}{name}" for name in ("of full", "KL", "same token")]
    body = []
    for method, own in found.items():
        cells = [code(method), f"{own['4 sinks']['bits_per_value']:.2f}"]
        for kept in KEPT:
            row = own[kept]
            cells += [
                f"{row['ratio']:.3f} ± {error(row)}",
                divergence(row),
                f"{row['agreement']:.1%}",
            ]
        body.append(cells)
    return markdown(head, body)


@table
def rivals_wikitext2() -> str:
    return on_text("WikiText-2")


@table
def rivals_c4() -> str:
    return on_text("C4")


@table
def rivals_code() -> str:
    return on_text("Python source")


@table
def rivals_used() -> str:
    """Along the full cache's own continuation: KL by position, and tokens until the first other one."""
    found = rows("rivals-used")
    places = list(found[0]["kl_by_position"])
    head = ["method", "bits per value", "of fp16 cache", "KL", *(f"at {place}" for place in places)]
    head += ["same token", "first other token, median", "mean", "none"]
    body = []
    for row in found:
        body.append(
            [
                code(row["method"]),
                f"{row['bits_per_value']:.2f}",
                f"{row['cache_ratio']:.1%}",
                f"{row['kl']:.5f}",
                *(f"{row['kl_by_position'][place]:.5f}" for place in places),
                f"{row['same_token']:.1%}",
                f"{row['median_first_difference']:g}",
                f"{row['mean_first_difference']:.0f}",
                f"{row['never_differs']} of {len(row['first_difference'])}",
            ]
        )
    return markdown(head, body)


@table
def turns() -> str:
    """Ten turns in one cache: KL of the answers by turn, and how many answers are the full cache's."""
    found = rows("turns-smollm2")
    count = len(found[0]["kl_by_turn"])
    head = ["method", "bits per value", "KL", *(f"turn {turn}" for turn in range(1, count + 1))]
    head += ["same token", "same answers"]
    body = []
    for row in found:
        body.append(
            [
                code(row["method"]),
                f"{row['bits_per_value']:.2f}",
                f"{row['kl']:.5f}",
                *(f"{kl:.4f}" for kl in row["kl_by_turn"]),
                f"{row['same_token']:.1%}",
                f"{row['never_differs']} of {len(row['first_difference'])}",
            ]
        )
    return markdown(head, body)


@table
def transform_classes() -> str:
    """Each of tc's methods without classes of tokens and with four, on the three texts."""
    found = {(row["of"], row["kept"], row["text"]): row for row in rows("rivals")}
    texts = "WikiText-2", "C4", "Python source"
    head = ["method", "bits"]
    head += [f"{text}: {name}" for text in texts for name in ("of full", "KL", "KL in use")]
    body = []
    for base in ("tc-2bit", "tc-cl-2bit", "tc-cl-1bit"):
        for method in (base, f"{base}:group=256,classes=4"):
            cells = [code(method), f"{found[method, '4 sinks', texts[0]]['bits_per_value']:.2f}"]
            for text in texts:
                alone, used = (found[method, kept, text] for kept in KEPT)
                cells += [
                    f"{alone['ratio']:.3f} ± {error(alone)}",
                    divergence(alone),
                    divergence(used),
                ]
            body.append(cells)
    return markdown(head, body)


@table
def greedy() -> str:
    """Texts that caches write themselves, beside the full cache's."""
    head = ["method", "bits per value", "KL", "first other token, median", "mean", "none"]
    head += ["tokens to change, median", "mean"]
    body = []
    for row in rows("greedy-smollm2"):
        count = len(row["edit_distance"])
        body.append(
            [
                code(row["method"]),
                f"{row['bits_per_value']:.2f}",
                f"{row['kl']:.5f}",
                f"{row['median_first_difference']:g}",
                f"{row['mean_first_difference']:.0f}",
                f"{row['never_differs']} of {count}",
                f"{median(row['edit_distance']):g}",
                f"{fmean(row['edit_distance']):.0f}",
            ]
        )
    return markdown(head, body)
