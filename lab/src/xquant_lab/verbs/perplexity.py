"""``xquant perplexity``: what compression costs a model, through the real packed store."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import click

from xquant.cli.common import (
    calibrations_option,
    chosen,
    json_option,
    methods_option,
    model_options,
    resume_option,
    text_options,
    weights_bits_option,
)
from xquant.cli.progress import progress
from xquant.cli.tables import print_table, say, wide_option
from xquant.text import read_text

from .asked import Asked, Rows, attend_option, end
from .on_text import OnText

COLUMNS = {
    "method": "left",
    "perplexity": "right",
    "relative": "right",
    "std. error": "right",
    "KL": "right",
    "same token": "right",
    "bits per value": "right",
    "in codes": "right",
    "of fp16 cache": "right",
    "cache, MB": "right",
    "seconds": "right",
}


@click.command()
@model_options
@methods_option
@text_options()
@attend_option("How the text is read")
@calibrations_option
@weights_bits_option
@resume_option()
@wide_option
@json_option
def perplexity(
    specs: Sequence[str],
    text: str,
    context: int,
    windows: int,
    attend: str,
    json_file: str | None,
    **asked: Any,
) -> None:
    """Measure MODEL's perplexity on a text with the cache compressed by each method.

    The text is cut into windows from its start; every token reads keys and values that went through
    the packed store. The full cache is measured in the same run, and each method's predictions are
    compared with its own: the standard error is that of the logarithm of the relative perplexity, KL the
    mean divergence in nats, "same token" how often the most likely one is the same. With a method that
    drops tokens or stores codes of a layer above, all read the text a block at a time (--attend chunk).
    """
    specs = chosen(specs, asked["artifacts"])
    end(*run(Asked(**asked), specs, text, context, windows, attend), json_file, print_rows)


def run(
    asked: Asked, specs: Sequence[str], text: str, context: int, windows: int, attend: str
) -> tuple[Rows, dict[str, Any]]:
    """The measurement of this verb and of ``compare``: rows, and what they were measured on."""
    words = read_text(text)  # before torch is imported
    from xquant import parse_method

    from ..evals.journal import Journal
    from ..evals.perplexity import measure

    methods = list(dict.fromkeys(map(parse_method, specs)))
    on = OnText.begin(asked, methods, text, words, context, windows)
    with progress("measuring perplexity") as show:
        late = partial(on.calibrate, show=show)
        journal = Journal(on.runs, show)
        rows = measure(on.network, on.ids, methods, on.calibrations, journal, late, attend)
    on.subject["calibrations"] = {made.method: made.text for made in on.calibrations}
    return [row.to_dict() for row in rows], on.subject


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """The table on standard output."""
    print_table(
        COLUMNS,
        [
            (
                row["method"],
                f"{row['perplexity']:.3f}",
                f"{row['ratio']:.4f}",
                "" if row["difference_error"] is None else f"{row['difference_error']:.4f}",
                f"{row['kl']:.4f}",
                f"{row['agreement']:.1%}",
                f"{row['bits_per_value']:.2f}",
                f"{row['code_bits']:.2f}",
                f"{row['cache_ratio']:.1%}",
                f"{row['cache_bytes'] / 1e6:.2f}",
                f"{row['seconds']:.1f}",
            )
            for row in rows
        ],
        extra=("in codes", "seconds", "std. error", "cache, MB", "of fp16 cache", "same token"),
    )
    if rows[0]["block"]:
        say(f"Read {rows[0]['block']} tokens at a time, which see each other exactly.")
