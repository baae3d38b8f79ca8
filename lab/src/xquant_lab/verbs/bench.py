"""``xquant bench``: decode time and bytes beside the full cache, interleaved in one run."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import TYPE_CHECKING

import click

from xquant.cli.common import (
    MODEL,
    calibrations_for,
    calibrations_option,
    chosen,
    find_device,
    json_option,
    load,
    methods_option,
    own_calibrations,
    resume_option,
    shapes,
    weights_bits_option,
)
from xquant.cli.progress import progress
from xquant.cli.tables import wide_option
from xquant.kernels import KERNELS
from xquant.results import environment

from .bench_report import Report
from .bench_tables import print_largest, print_rows

if TYPE_CHECKING:
    import torch

    from xquant.calibrations import Calibrations
    from xquant.methods import Method
    from xquant.runs import Rows

    from ..bench.contenders import Models
    from ..bench.trials import Settings

    Subjects = Callable[[int, int], tuple[Models, Calibrations]]
    """What decodes, and the calibrations for it, at a context and a batch."""
    See = Callable[[Rows], None]
    Part = tuple[str, Callable[[See], Rows]]
    """Its name, and what measures it: contenders take turns within one. It shows its rows as they come."""

COMPILED = 64
"""Times that one function of a model may be compiled; with more it would run uncompiled."""
DTYPES = ("auto", "float32", "bfloat16", "float16")


@click.command()
@click.argument("model", required=False, type=MODEL)
@click.option(
    "--shape",
    shell_complete=shapes,
    help="Attention alone, at a known model's shape: llama-3.1-8b, llama-2-7b.",
)
@methods_option
@click.option(
    "--context",
    "contexts",
    type=click.IntRange(1),
    multiple=True,
    default=(8192,),
    show_default=True,
    help="Tokens held; may be given several times.",
)
@click.option(
    "--batch",
    "batches",
    type=click.IntRange(1),
    multiple=True,
    default=(1,),
    show_default=True,
    help="Sequences; may be given several times.",
)
@click.option("--rounds", type=click.IntRange(1), default=15, show_default=True, help="Repetitions.")
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="auto",
    show_default=True,
    help="Of the weights; auto is bfloat16 on a GPU, and on a CPU tries float32 too and gives each row"
    " the faster.",
)
@click.option("--device", help="Such as cpu or cuda:1.  [default: cuda where there is one]")
@click.option(
    "--kernel",
    type=click.Choice(KERNELS),
    default="auto",
    show_default=True,
    help="Of the compressed caches; on a GPU auto is triton, where it agrees with the reference.",
)
@click.option(
    "--layers",
    type=click.IntRange(1),
    help="Of a shape.  [default: 8 on a CPU, on a GPU as many as fit]",
)
@click.option("--sealing", is_flag=True, help="Also time how tokens are appended and sealed.")
@click.option(
    "--parts",
    is_flag=True,
    help="Also what a token's attention is made of: packing it, reading codes, reading outliers.",
)
@click.option(
    "--peers",
    is_flag=True,
    help="Also transformers' QuantizedCache, and for smollm2 llama.cpp and OpenVINO: those whose packages are"
    " installed.",
)
@click.option(
    "--packed",
    is_flag=True,
    help="Weights in oneDNN's layout for the compressed caches, and for more settings of the full one (CPU).",
)
@weights_bits_option
@click.option("--compile", "compiled", is_flag=True, help="Models are compiled, in the same way (CPU).")
@click.option(
    "--static",
    is_flag=True,
    help="Also a StaticKVCache of every method, in a row of its own (CPU).",
)
@click.option(
    "--largest-batch",
    is_flag=True,
    help="Instead decode with all of a shape's weights, and as many sequences as fit beside them.",
)
@click.option(
    "--memory",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GB",
    help="What weights and caches may take then.  [default: what is free on the GPU]",
)
@calibrations_option
@resume_option("the rows of every context and batch in which nothing failed")
@wide_option
@json_option
def bench(
    model: str | None,
    shape: str | None,
    specs: Sequence[str],
    contexts: Sequence[int],
    batches: Sequence[int],
    rounds: int,
    dtype: str,
    device: str | None,
    kernel: str,
    layers: int | None,
    sealing: bool,
    parts: bool,
    peers: bool,
    packed: bool,
    weights_bits: int | None,
    compiled: bool,
    static: bool,
    largest_batch: bool,
    memory: float | None,
    artifacts: Sequence[str],
    resume: str | None,
    json_file: str | None,
) -> None:
    """Time decoding with the cache of MODEL compressed by each method.

    Caches are filled with random states and decode in turn, round by round. The row of the full cache
    is the best of its settings: on a CPU transformers' own (fp32 or bf16, sdpa or eager), on a GPU every
    kernel that can be had. There the kernels of attention are replayed as a CUDA graph. Without --method the
    recommended ones are timed that caches are decoded from.

    The file of --json has the rows after every round. A first table comes after the first round, and a run
    that is stopped shows what it has: rows say how many rounds they are of.
    """
    if (model is None) == (shape is None):
        raise ValueError("give either MODEL or --shape NAME")
    if shape is None and (largest_batch or layers):
        raise ValueError("--layers and --largest-batch want a shape: --shape NAME")
    if parts and largest_batch:
        raise ValueError("--parts times attention, and --largest-batch whole steps: give one of them")
    if peers and shape is not None:
        raise ValueError("--peers decode with a MODEL, not with a shape")
    if (packed or weights_bits or compiled or static) and shape is not None:
        raise ValueError(
            "--packed, --weights-bits, --compile and --static time steps of a MODEL, not a shape"
        )
    if packed and weights_bits:
        raise ValueError("--packed keeps all bits of the weights: give it or --weights-bits")
    import torch

    from xquant import parse_method
    from xquant.runs import Runs

    from ..bench.parts import with_dense
    from ..bench.trials import Settings

    methods = [parse_method(spec) for spec in chosen(specs, artifacts, decoding=True)]
    if parts:
        methods = with_dense(methods)
    calibrations = calibrations_for(methods, artifacts)
    where = find_device(device)
    if (packed or compiled or static) and where.type != "cpu":
        raise ValueError("--packed, --compile and --static are timed on a CPU")
    if where.type == "cuda":
        torch.cuda.set_device(where)  # where kernels are launched
    if compiled:  # every setting of the full cache is compiled by itself
        torch._dynamo.config.recompile_limit = COMPILED
        torch._dynamo.config.fail_on_recompile_limit_hit = True
    names = DTYPES[1:3] if where.type == "cpu" else DTYPES[2:3]
    dtypes = tuple(getattr(torch, name) for name in (names if dtype == "auto" else (dtype,)))
    settings = Settings(
        contexts[0],
        rounds=rounds,
        kernel=kernel,
        dtypes=dtypes,
        whole=shape is None,
        sealing=sealing,
        packed=packed,
        weights_bits=weights_bits,
        compiled=compiled,
        static=static,
        parts=parts,
    )
    facts = {"calibrations": " ".join(sorted(made.digest for made in calibrations))}
    if shape is None:
        assert model is not None
        subjects, facts = _loaded(model, methods, dtypes[0], where, calibrations, weights_bits)
        todo = _sizes(subjects, methods, settings, contexts, batches, model if peers else None)
    elif largest_batch:
        todo = _largest(shape, methods, settings, contexts, where, memory, calibrations)
    else:
        subjects = _shaped(shape, methods, dtypes[0], where, calibrations, layers)
        todo = _sizes(subjects, methods, settings, contexts, batches)
    subject = {"model": model or shape, "device": str(where)}
    machine = environment()
    asked = {
        **subject,
        "methods": [method.spec for method in methods],
        "settings": repr(replace(settings, context=0)),
        "options": [peers, layers, largest_batch, memory],
        "identity": facts,
        "machine": [machine[fact] for fact in ("cpu", "threads", "gpu", "torch", "transformers")],
    }
    runs = Runs(resume, asked)
    report = Report(print_largest if largest_batch else print_rows, json_file, subject)
    try:
        for name, measure in todo:
            held = runs.load(name)
            if held is None:
                held = measure(report.see)
                if not any(row["failed"] or (row.get("sealing") or {}).get("failed") for row in held):
                    runs.save(name, held)  # what failed is tried again
            report.add(held)
    finally:  # what was measured stays, whatever becomes of the rest
        report.end()


def _sizes(
    subjects: "Subjects",
    methods: "Sequence[Method]",
    settings: "Settings",
    contexts: Sequence[int],
    batches: Sequence[int],
    peers_of: str | None = None,
) -> "Iterator[Part]":
    """A part for every size."""
    from ..bench import run as evaluation
    from ..bench.ceilings import ceilings
    from ..bench.peers import available

    limits = cache(ceilings)  # on a GPU for all sizes; on a CPU after each, as its load changes

    def measure(context: int, batch: int, see: "See") -> "Rows":
        models, calibrations = subjects(context, batch)
        device = models.model.device
        known = None if device.type == "cpu" else limits(device)
        makers = available(peers_of, models.model, batch) if peers_of else {}
        asked = replace(settings, context=context, batch=batch)
        with progress(f"timing {context} tokens, batch {batch}") as show:
            return evaluation.bench(models, methods, asked, show, calibrations, makers, known, see)

    for context, batch in product(contexts, batches):
        yield f"{context} tokens, batch {batch}", partial(measure, context, batch)


def _loaded(
    model: str,
    methods: "Sequence[Method]",
    dtype: "torch.dtype",
    device: "torch.device",
    calibrations: "Calibrations",
    weights_bits: int | None,
) -> "tuple[Subjects, dict[str, str]]":
    """A model with its weights, and what they are."""
    from xquant.runs import identity

    from ..bench.contenders import Models

    name = str(dtype).removeprefix("torch.") if device.type == "cuda" else "float32"
    network, tokenizer = load(model, name, str(device), weights_bits)
    found = own_calibrations(network, tokenizer, methods, calibrations)
    facts = identity(network, "", found)
    models = Models(network)
    return (lambda context, batch: (models, found)), facts


def _shaped(
    shape: str,
    methods: "Sequence[Method]",
    dtype: "torch.dtype",
    device: "torch.device",
    calibrations: "Calibrations",
    layers: int | None,
) -> "Subjects":
    """As many layers of a shape as are asked for, or fit."""
    from xquant.calibrations import Calibrations

    from ..bench import capacity
    from ..bench import shaped as shapes
    from ..bench.contenders import Models

    on_gpu = device.type == "cuda"

    @cache
    def made(count: int) -> "tuple[Models, Calibrations]":
        network = shapes.shaped_model(shape, count, device, *([dtype] if on_gpu else []))
        own = [method for method in methods if method.calibrates_itself]
        random = [shapes.random_calibration(network, m) for m in Calibrations().lacking(own)]
        return Models(network), Calibrations([*calibrations, *random])

    def at(context: int, batch: int) -> "tuple[Models, Calibrations]":
        count = layers or shapes.SHAPE_LAYERS
        if layers is None and on_gpu:
            room = capacity.SHARE * capacity.free_bytes(device)
            count = shapes.fitting_layers(shape, methods, dtype, (context, batch), room)
        return made(count)

    return at


def _largest(
    shape: str,
    methods: "Sequence[Method]",
    settings: "Settings",
    contexts: Sequence[int],
    device: "torch.device",
    memory: float | None,
    calibrations: "Calibrations",
) -> "Iterator[Part]":
    """A part for every context."""
    from ..bench import capacity, largest
    from ..bench.contenders import Models
    from ..bench.shaped import whole_model

    if memory is None and device.type == "cpu":
        raise ValueError("--largest-batch wants a GPU, or --memory GB")
    dtype = settings.dtypes[-1]
    made = cache(lambda: Models(whole_model(shape, device, dtype)))

    def measure(context: int, see: "See") -> "Rows":
        models = made()
        weights = sum(p.nbytes for p in models.model.parameters())
        room = capacity.free_bytes(device) if memory is None else memory * 1e9 - weights
        with progress(f"finding the largest batch of {context} tokens") as show:
            rows: Rows = []
            for row in largest.largest_batches(
                models, methods, context, dtype, settings.kernel, room, show, calibrations
            ):
                see(rows := [*rows, row])
            return rows

    for context in contexts:
        yield f"{context} tokens", partial(measure, context)
