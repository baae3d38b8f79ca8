"""``xquant widths``: bits by layer, of keys and of values, that lose less at the same bytes."""

from collections.abc import Sequence
from typing import Any

import click

from xquant.cli.common import (
    SPEC,
    calibrations_option,
    json_option,
    model_options,
    resume_option,
    text_options,
)
from xquant.cli.progress import progress
from xquant.cli.tables import say, wide_option
from xquant.text import read_text

from .asked import Asked, Rows, end
from .on_text import OnText
from .perplexity import print_rows


@click.command()
@model_options
@click.option("--method", "spec", metavar="SPEC", type=SPEC, default="kivi-3bit", show_default=True)
@text_options(context=1024, windows=1)
@calibrations_option
@resume_option()
@wide_option
@json_option
def widths(spec: str, text: str, context: int, windows: int, json_file: str | None, **asked: Any) -> None:
    """Find out which layers' keys and values of MODEL are worth more bits.

    Measures on a text what the method costs at the keys and at the values of each layer alone, and moves
    bits from where they are worth least to where they are worth most. What it prints, a spec with the
    option "layers", takes as many bytes as the method did, and is used as any other. It was chosen on this
    text: measure it on another one.
    """
    rows, subject = run(Asked(**asked), spec, text, context, windows)
    end(rows, subject, json_file, _print)


def run(asked: Asked, spec: str, text: str, context: int, windows: int) -> tuple[Rows, dict[str, Any]]:
    words = read_text(text)  # before torch is imported
    from xquant import parse_method
    from xquant.methods.base import LayeredMethod

    from ..evals.journal import Journal
    from ..evals.widths import move_bits

    method = parse_method(spec)
    if not isinstance(method, LayeredMethod):
        raise ValueError(f"{spec}: the layers of {method.name} have no bits that could be moved by hand")
    on = OnText.begin(asked, [method], text, words, context, windows)
    with progress("moving bits") as show:
        calibrations = on.calibrate([method], show)
        rows = move_bits(on.network, on.ids, method, calibrations, Journal(on.runs, show))
    return [row.to_dict() for row in rows], on.subject


def _print(rows: Sequence[dict[str, Any]]) -> None:
    print_rows(rows)
    if rows[0] == rows[-1]:
        say("No move of a bit gains anything on this text.")
