"""``xquant bench``: decode time and bytes beside the full cache, interleaved in one run."""

from collections.abc import Mapping, Sequence
from typing import Any

import click

from ..evals.results import STDOUT
from ..kernels import KERNELS
from .common import (
    calibrations_for,
    calibrations_option,
    check_file,
    finish,
    json_option,
    load,
    methods_option,
    own_calibrations,
    print_table,
    progress_bar,
)

COLUMNS = {
    "method": "left",
    "dtype": "left",
    "kernel": "left",
    "ms a token": "right",
    "times full": "right",
    "attention, ms a layer": "right",
    "cache, MB": "right",
    "GB/s": "right",
    "of read": "right",
}
DEFAULT_METHODS = ("kivi-4bit", "kivi-2bit")
DTYPES = ("auto", "float32", "bfloat16")


@click.command()
@click.argument("model", required=False)
@click.option(
    "--shape", help="Attention alone, at a known model's shape: llama-3.1-8b, llama-2-7b."
)
@methods_option
@click.option(
    "--context", type=click.IntRange(1), default=8192, show_default=True, help="Tokens held."
)
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Sequences.")
@click.option(
    "--rounds", type=click.IntRange(1), default=15, show_default=True, help="Repetitions."
)
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="auto",
    show_default=True,
    help="Of the weights; auto tries both, and gives each row the faster.",
)
@click.option("--device", help="Such as cpu or cuda:1.  [default: cuda where there is one]")
@click.option(
    "--kernel",
    type=click.Choice(KERNELS),
    default="auto",
    show_default=True,
    help="Of the compressed caches.",
)
@click.option(
    "--peers",
    is_flag=True,
    help="Also transformers' QuantizedCache and llama.cpp, where their packages are installed.",
)
@calibrations_option
@json_option
def bench(
    model: str | None,
    shape: str | None,
    specs: Sequence[str],
    context: int,
    batch: int,
    rounds: int,
    dtype: str,
    device: str | None,
    kernel: str,
    peers: bool,
    artifacts: Sequence[str],
    json_file: str | None,
) -> None:
    """Time decoding with the cache of MODEL compressed by each method.

    Caches are filled with random states and decode in turn, round by round. The row of the full cache
    is the best of transformers' own settings: fp32 or bf16, sdpa or eager.
    """
    import torch

    from .. import parse_method
    from ..evals import bench as evaluation
    from ..evals.peers import available
    from ..methods.transform import Transform

    if (model is None) == (shape is None):
        raise ValueError("give either MODEL or --shape NAME")
    if peers and shape is not None:
        raise ValueError("--peers decode with a MODEL, not with a shape")
    check_file(json_file)
    methods = [parse_method(spec) for spec in specs or DEFAULT_METHODS]
    calibrations = calibrations_for(methods, artifacts)
    if shape is not None:
        network = evaluation.shaped_model(shape).to(device or "cpu")
        own = {m.calibrated_as: m for m in methods if isinstance(m, Transform)}
        calibrations += [evaluation.random_calibration(network, m) for m in own.values()]
    else:
        assert model is not None
        network, tokenizer = load(model, "float32", device)
        calibrations = own_calibrations(network, tokenizer, methods, calibrations)
    dtypes = tuple(getattr(torch, name) for name in DTYPES[1:] if dtype in ("auto", name))
    settings = evaluation.Settings(context, batch, rounds, kernel=kernel, dtypes=dtypes)
    makers = available(model, network) if peers and model is not None else []
    with progress_bar() as show:
        rows = evaluation.bench(
            network, methods, settings, shape is None, show, calibrations, makers
        )
    subject = {"model": model or shape, "device": str(network.device)}
    finish(rows, json_file, **subject)
    if json_file != STDOUT:
        print_rows(rows)


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """The table on standard output."""

    def show(number: float | None, form: str) -> str:
        return "" if number is None else format(number, form)

    print_table(
        COLUMNS,
        [
            (
                row["method"],
                row["dtype"],
                row["kernel"],
                f"{row['ms_per_token']:.2f}",
                f"{row['speedup_vs_full']:.2f}",
                show(row["attention_ms_per_layer"], ".3f"),
                f"{row['cache_bytes'] / 1e6:.1f}",
                show(row["gbytes_per_second"], ".1f"),
                show(row["share_of_read_bandwidth"], ".0%"),
            )
            for row in rows
        ],
    )
