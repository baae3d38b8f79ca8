"""``xquant calibrate``: the artifact that a method needs."""

import time
from typing import Any

import click

from ..catalogue import NONE, read_spec
from ..results import STDOUT
from .common import (
    OUT_FILE,
    RESUME,
    SPEC,
    finish,
    json_option,
    known_methods,
    load,
    model_options,
    resume_option,
    text_options,
)
from .progress import progress
from .tables import say


@click.command()
@model_options
@click.option("--method", "spec", metavar="SPEC", type=SPEC, required=True)
@text_options(context=None, windows=None, help="Text file; without it the model writes the text itself.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the text it writes.")
@click.option(
    "--output",
    metavar="FILE",
    type=OUT_FILE,
    required=True,
    help="The artifact, a safetensors file.",
)
@resume_option("the text that MODEL writes (not the statistics, which take less time)")
@json_option
@click.pass_context
def calibrate(
    context_of_command: click.Context,
    model: str,
    dtype: str,
    device: str | None,
    spec: str,
    text: str | None,
    context: int | None,
    windows: int | None,
    seed: int,
    output: str,
    resume: str | None,
    json_file: str | None,
) -> None:
    """Gather the statistics that a method needs on MODEL, from a text or from one that MODEL writes.

    The file is for this method and this model; give it to the other verbs as --calibration FILE.
    """
    if output == STDOUT:
        raise ValueError("the artifact is written to a file, not to standard output")
    if text is not None:
        if resume is not None:
            raise ValueError(
                "--resume keeps the text that MODEL writes: with --text there is nothing to keep"
            )
        del context_of_command.meta[RESUME]
    entry = known_methods().get(read_spec(spec, known_methods)[0])
    if entry is not None and entry.calibration == NONE:
        raise ValueError(f"{spec} needs no calibration")
    from ..text import read_text, text_name

    words = None if text is None else read_text(text)  # before torch is imported
    from .. import calibration_store, parse_method
    from ..calibrators.run import calibrate as run
    from ..runs import Runs, identity

    method = parse_method(spec)
    if not method.needs_calibration:  # with these options
        raise ValueError(f"{method.spec} needs no calibration")
    network, tokenizer = load(model, dtype, device)
    size = context or method.calibration_size[0], windows or method.calibration_size[1]
    where = str(network.device)
    asked = {"model": model, "dtype": dtype, "device": where, "size": size, "seed": seed}
    if text is None and resume is None:
        context_of_command.meta[RESUME] = calibration_store.unfinished()
    runs = Runs(resume, {**asked, "identity": identity(network, "", [])}) if resume else None
    started = time.perf_counter()
    with progress(f"calibrating {method.calibrated_as}") as show:
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
            runs=runs,
        )
    seconds = time.perf_counter() - started
    found.save(output)
    row: dict[str, Any] = {
        "method": found.method,
        "output": output,
        "calibration_text": found.text,
        "tokens": size[0] * size[1],
        "seconds": seconds,
    }
    finish([row], json_file, model=model, dtype=dtype, device=where)
    if json_file != STDOUT:
        say(f"{output}: {found.method} from {found.text}, in {seconds:.0f} s")
