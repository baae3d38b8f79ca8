"""``xquant calibrate``: the artifact that a method needs."""

import time
from typing import Any

import click

from ..evals.results import STDOUT
from .common import check_file, finish, json_option, load, model_options, progress_bar, text_options


@click.command()
@model_options
@click.option("--method", "spec", metavar="SPEC", required=True)
@text_options(
    context=None, windows=None, help="Text file; without it the model writes the text itself."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the text it writes.")
@click.option("--output", metavar="FILE", required=True, help="The artifact, a safetensors file.")
@json_option
def calibrate(
    model: str,
    dtype: str,
    device: str | None,
    spec: str,
    text: str | None,
    context: int | None,
    windows: int | None,
    seed: int,
    output: str,
    json_file: str | None,
) -> None:
    """Gather the statistics that a method needs on MODEL, from a text or from one that MODEL writes.

    The file is for this method and this model; give it to the other verbs as --calibration FILE.
    """
    import sklearn.cluster  # noqa: F401  # a missing package is told of at once

    from .. import parse_method
    from ..calibrate.run import calibrate as run
    from ..evals.text import read_text, text_name

    method = parse_method(spec)
    if not method.needs_calibration:
        raise ValueError(f"{method.spec} needs no calibration")
    if output == STDOUT:
        raise ValueError("the artifact is written to a file, not to standard output")
    check_file(output)
    check_file(json_file)
    words = None if text is None else read_text(text)
    network, tokenizer = load(model, dtype, device)
    started = time.perf_counter()
    with progress_bar() as show:
        found = run(
            network,
            tokenizer,
            method,
            words,
            context,
            windows,
            name="" if text is None else text_name(text),
            seed=seed,
            progress=show,
        )
    seconds = time.perf_counter() - started
    found.save(output)
    row: dict[str, Any] = {
        "method": found.method,
        "output": output,
        "calibration_text": found.text,
        "tokens": (context or method.calibration_size[0]) * (windows or method.calibration_size[1]),
        "seconds": seconds,
    }
    finish([row], json_file, model=model, dtype=dtype, device=str(network.device))
    if json_file != STDOUT:
        click.echo(f"{output}: {found.method} from {found.text}, in {seconds:.0f} s")
