"""``xquant plan``: what a method's cache takes, what fits on a GPU, and how far rematerializing is free."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from ..analysis.gpus import GPU, GPUS, find_gpu
from ..catalogue import RECOMMENDED
from ..hub import PACKAGED, check_model
from ..results import STDOUT
from .common import DTYPES, IN_FILE, Checked, finish, json_option, methods_option, shapes
from .tables import print_table, say, wide_option

if TYPE_CHECKING:
    import torch

    from ..analysis.memory import CacheLayout
    from ..analysis.shapes import Skeleton
    from ..methods import Method
    from ..serve.build import Model
    from ..serve.capacity import Room

BASELINE = "full"
USUAL = 8192
"""Tokens that are planned for where nothing is said."""
SMALLER_METHODS = ("kivi-2bit", "tc-1bit")
"""Methods that are tried, too, where nothing fits. Those at rest are no answer: a model decodes beside its
weights."""
RULE = (
    "The rule: take the method with the widest codes that fits. Between equals, take one that stores keys and"
    " values themselves, then one without calibration, then the smallest. 'xquant compare' measures what a"
    " method loses on your model."
)
PARTS = {
    "codes": "codes",
    "ranges": "scales, zeros",
    "outliers": "outliers",
    "tables": "tables",
    "sinks": "sinks",
    "tail": "tail",
    "index": "index",
    "skipped": "other layers",
}
FITS = {
    "method": "left",
    "cache, MB": "right",
    "of fp16 cache": "right",
    "activations, GB": "right",
    "total, GB": "right",
    "fits": "right",
    "longest context": "right",
    "fits in memory": "right",
    "largest batch": "right",
    "memory-bound to": "right",
}
LESS = ("memory-bound to", "activations, GB", "fits in memory", "total, GB", "of fp16 cache")
"""What is left out first."""


def gpus(context: click.Context, option: click.Parameter, begun: str) -> list[str]:
    """GPUs whose names begin so, for shells."""
    return [name for name in GPUS if name.startswith(begun)]


def _check_model(name: str) -> None:
    check_model(name, enough=", and a folder that holds only config.json is enough")


@click.command()
@click.argument("model", required=False, type=Checked("model", _check_model, lambda: PACKAGED, "dir"))
@click.option(
    "--shape", metavar="NAME", shell_complete=shapes, help="A known model's sizes, such as llama-3.1-8b."
)
@click.option(
    "--gpu", metavar="NAME", shell_complete=gpus, help="Such as h100-pcie.  [required, or --engine]"
)
@click.option("--engine", type=click.Choice(("vllm",)), help="Plan for an engine instead.")
@click.option(
    "--memory",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GB",
    help="With --engine: what the cache may take; vLLM's kv_cache_memory_bytes.",
)
@click.option(
    "--shards",
    type=click.IntRange(1),
    default=1,
    help="With --engine: processes that share the heads; vLLM's tensor_parallel_size.  [default: 1]",
)
@click.option(
    "--drafts",
    type=click.IntRange(0),
    default=0,
    help="With --engine: tokens guessed at a time; vLLM's num_speculative_tokens.  [default: 0]",
)
@click.option(
    "--calibration",
    "artifacts",
    metavar="FILE",
    type=IN_FILE,
    multiple=True,
    help="With --engine: artifact of 'xquant calibrate'; may be given several times, one a method.",
)
@methods_option
@click.option(
    "--context",
    type=click.IntRange(1),
    help=f"Tokens held.  [default: {USUAL:,}, or the model's positions where they are fewer]",
)
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Sequences.")
@click.option(
    "--chunk",
    type=click.IntRange(1),
    default=2048,
    show_default=True,
    help="Tokens of a prompt that are read at a time.",
)
@click.option(
    "--past-positions", is_flag=True, help="Also plan for more tokens than the model has positions."
)
@click.option(
    "--dtype",
    type=click.Choice(("auto", *DTYPES)),
    default="auto",
    show_default=True,
    help="Of the weights; auto is the configuration's own, bfloat16 where it names none. With --engine,"
    " vLLM's dtype, whose auto is bfloat16 for float32, too.",
)
@click.option(
    "--weights-bits",
    type=click.FloatRange(2, 16),
    metavar="N",
    help="Of a weight in linear layers and experts, in groups of 128 with a 16-bit scale, in place of the"
    " quantization that the configuration names.",
)
@wide_option
@json_option
def plan(
    model: str | None,
    shape: str | None,
    gpu: str | None,
    engine: str | None,
    memory: float | None,
    shards: int,
    drafts: int,
    artifacts: Sequence[str],
    specs: Sequence[str],
    context: int | None,
    batch: int,
    chunk: int,
    past_positions: bool,
    dtype: str,
    weights_bits: float | None,
    json_file: str | None,
) -> None:
    """Say what the cache of MODEL takes with each method, from its configuration alone.

    A folder that holds only config.json is enough.

    The full cache is always the first row; without --method the recommended ones follow it. What fits is
    weights, cache and activations; the longest context is within the model's positions.

    With --engine vllm: the tokens that fit into its cache, as it will report them.
    """
    if (model is None) == (shape is None):
        raise ValueError("give either MODEL or --shape NAME")
    if (gpu is None) == (engine is None) or (engine is None) != (memory is None):
        raise ValueError("give either --gpu NAME or --engine vllm and --memory GB")
    if engine is None and (shards > 1 or drafts or artifacts):
        raise ValueError("--shards, --drafts and --calibration are for --engine")
    if engine is not None and weights_bits is not None:
        raise ValueError("--weights-bits is for --gpu: an engine's --memory is without its weights")
    known = None if gpu is None else find_gpu(gpu)
    from transformers.utils import logging

    from .. import parse_method
    from ..analysis.memory import layouts_of
    from ..analysis.plan import plan as make_plan
    from ..analysis.shapes import Skeleton, load_config, shape_config
    from ..serve.build import Model

    recommended = [each.spec for each in RECOMMENDED]
    asked = [parse_method(spec) for spec in (BASELINE, *(specs or recommended))]
    logging.set_verbosity_error()
    config = shape_config(shape) if shape is not None else load_config(str(model))
    skeleton = Skeleton(config, _dtype(config, dtype, served=engine is not None), weights_bits)
    positions = skeleton.positions
    if context is None:
        context = min(USUAL, positions or USUAL)
    if not past_positions:
        _check_context(context, positions)
    unique = list(dict.fromkeys(asked))
    if memory is not None:
        name = str(model or shape)
        served = Model(config, skeleton.model.dtype, _folder(model, unique), shards)
        found = _served(served, unique, int(memory * 1e9), context, drafts, artifacts)
        subject = {"engine": engine, "context": context, "shards": shards, "drafts": drafts}
        finish(found, json_file, model=name, dtype=_name(skeleton), **subject)
        if json_file != STDOUT:
            _print_served(found)
        return
    assert known is not None
    gpu, card = known
    layouts, refused = layouts_of(skeleton, unique)
    if specs and refused:
        raise ValueError(next(iter(refused)))
    rows = make_plan(layouts, card, context, batch, chunk, past_positions)
    name = str(model or shape)
    finish(rows, json_file, model=name, gpu=gpu, dtype=_name(skeleton), weights=skeleton.weights)
    if json_file != STDOUT:
        say(f"{_describe_model(name, skeleton)}\n{_describe_gpu(gpu, card)}\n")
        print_rows(rows)
        for reason, left_out in refused.items():
            say(f"\nnot {', '.join(left_out)}: {reason}")
        say(f"\n{advice(rows)}")
        if not any(row["fits"] for row in rows):
            more = [parse_method(spec) for spec in (*recommended, *SMALLER_METHODS)]
            others, _ = layouts_of(skeleton, [method for method in more if method not in unique])
            say(_what_would_fit([*layouts, *others], card, context, batch, chunk))
        say(RULE)


def _folder(model: str | None, methods: "Sequence[Method]") -> str:
    """Where the weights are that a calibration is checked against; empty for a shape."""
    from ..load import packaged_folder

    if model == "smollm2" and any(method.needs_calibration for method in methods):
        return str(packaged_folder())
    return model or ""


def _served(
    model: "Model",
    methods: "Sequence[Method]",
    nbytes: int,
    context: int,
    drafts: int,
    artifacts: Sequence[str],
) -> list[dict[str, Any]]:
    """What an engine holds in so many bytes of each shard: as it is, and with each method."""
    from ..calibration import Calibration
    from ..serve.capacity import USUAL_BATCH, planned_states, room_in, stock_room
    from ..serve.fit import wanted

    files = {Calibration.load(file).method: file for file in artifacts}

    def row_of(method: str, room: "Room") -> dict[str, Any]:
        sizes = {"block_bytes": room.nbytes, "ring_blocks": room.blocks_of_rings}
        tokens = room.tokens(nbytes, context, USUAL_BATCH * model.shards)
        return {"method": method, **sizes, "tokens": tokens}

    rows = [row_of("vLLM's own", stock_room(model, planned_states(model, drafts)))]
    for method in methods:
        asked = {"xquant": method.spec}
        if method.needs_calibration and method.calibrated_as in files:
            asked["xquant_calibration"] = files[method.calibrated_as]
        try:
            rows.append(row_of(method.spec, room_in(wanted(asked), model, drafts)))
        except ValueError as error:
            refused = str(error).removeprefix("xquant: ")
            rows.append({"method": method.spec, "refused": refused})
    return rows


def _print_served(rows: Sequence[Mapping[str, Any]]) -> None:
    first = rows[0]["tokens"]
    print_table(
        {"method": "left", "bytes of a block": "right", "tokens": "right", "times": "right"},
        [
            (
                row["method"],
                f"{row['block_bytes']:,}",
                f"{row['tokens']:,}",
                f"{row['tokens'] / first:.2f}",
            )
            for row in rows
            if "refused" not in row
        ],
    )
    for row in rows:
        if "refused" in row:
            say(row["refused"])


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """The tables on standard output: what fits, then what the caches hold."""
    print_table(FITS, [_fit(row) for row in rows], extra=LESS)
    held = [part for part in PARTS if any(row["parts"][part] for row in rows)]
    click.echo("\nIn the cache, MB")
    print_table(
        {"method": "left"} | {PARTS[part]: "right" for part in held},
        [(row["method"], *(f"{row['parts'][part] / 1e6:,.1f}" for part in held)) for row in rows],
        extra=("index", "tables", "sinks", "tail"),
    )
    if any(row["estimated"] for row in rows):
        say("\n~ an estimate: the bytes depend on the text or on the calibration")


def _check_context(context: int, positions: int | None) -> None:
    if positions is not None and context > positions:
        raise ValueError(
            f"a context of {context} is past the model's {positions} positions: --past-positions plans for it"
        )


def advice(rows: Sequence[Mapping[str, Any]]) -> str:
    """The method to take, in a sentence."""
    size = f"{rows[0]['context']:,} tokens, batch {rows[0]['batch']}"
    taken = next((row for row in rows if row["take"]), None)
    if taken is None:
        longest = max(rows, key=lambda row: int(row["max_context"]))
        if not longest["max_context"]:
            return f"None fits: not one token at batch {longest['batch']} beside the weights."
        return (
            f"None fits at {size}: the longest context there is {longest['max_context']:,} tokens, with"
            f" {longest['method']}."
        )
    if taken["method"] == BASELINE:
        return f"Take {BASELINE}: it fits at {size}, and keeps keys and values as they are."
    why = "rebuilds keys and values" if taken["rebuilds"] else "stores keys and values themselves"
    calibration = ", after a calibration" if taken["needs_calibration"] else ""
    return (
        f"Take {taken['method']}{calibration}: of what fits at {size} it has the widest codes"
        f" ({taken['code_bits']:.1f} bits), and it {why}."
    )


def _what_would_fit(layouts: "Sequence[CacheLayout]", gpu: GPU, context: int, batch: int, chunk: int) -> str:
    """What to change so that something fits, in a sentence with the bytes of each."""
    from ..analysis.plan import would_fit

    ways = []
    for row in would_fit(layouts, gpu, context, batch, chunk):
        bits = row["weights_bits"]
        how = row["method"] if bits is None else f"weights of {bits} bits with {row['method']}"
        ways.append(f"{how} ({row['total_bytes'] / 1e9:,.2f} GB in all)")
    if not ways:
        return "Nor would a smaller method, or weights of 4 bits."
    return f"What would fit: {', or '.join(ways)}."


def _fit(row: Mapping[str, Any]) -> tuple[str, ...]:
    active = max(row["prefill_bytes"], row["decode_bytes"])
    return (
        row["method"],
        f"{'~' if row['estimated'] else ''}{row['cache_bytes'] / 1e6:,.1f}",
        f"{row['cache_bytes'] / row['full_cache_bytes']:.1%}",
        f"{active / 1e9:,.2f}",
        f"{row['total_bytes'] / 1e9:,.2f}",
        "yes" if row["fits"] else "no",
        f"{row['max_context']:,}",
        f"{row['max_context_in_memory']:,}",
        f"{row['max_batch']:,}",
        _bound(row),
    )


def _bound(row: Mapping[str, Any]) -> str:
    """Up to which context rematerializing is hidden behind reading from memory."""
    if row["rematerialization_flops"] is None:
        return ""
    bound = row["memory_bound_context"]
    return "any" if bound == float("inf") else f"{bound:,}"


def _dtype(config: Any, asked: str, served: bool) -> "torch.dtype":
    """``served``: by vLLM, which keeps only 16 bits where it is not told more."""
    import torch

    if asked == "auto":
        own = str(getattr(config, "dtype", None)).removeprefix("torch.")
        asked = own if own in DTYPES and not (served and own == "float32") else "bfloat16"
    found: torch.dtype = getattr(torch, asked)
    return found


def _name(skeleton: "Skeleton") -> str:
    return str(skeleton.model.dtype).removeprefix("torch.")


def _describe_model(name: str, skeleton: "Skeleton") -> str:
    positions = f"; {skeleton.positions:,} positions" if skeleton.positions else ""
    return (
        f"{name}: {skeleton.parameters / 1e9:,.2f} billion parameters,"
        f" {skeleton.nbytes / 1e9:,.2f} GB in {skeleton.weights}{positions}"
    )


def _describe_gpu(name: str, gpu: GPU) -> str:
    return (
        f"{name}: {gpu.memory / 1e9:g} GB, {gpu.bandwidth / 1e12:g} TB/s, {gpu.flops / 1e12:g} TFLOP/s:"
        f" {gpu.ridge:.0f} FLOPs a byte"
    )
