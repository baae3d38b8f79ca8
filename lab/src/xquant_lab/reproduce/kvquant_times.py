"""KVQuant's times: outlier thresholds (Table 15), calibration (16) and the parts of attention (22)."""

import time
from collections.abc import Callable
from statistics import median

import torch
from torch.nn.functional import linear
from torch.utils.benchmark import Timer

from xquant.calibrators.calibrator import Rows as Sample
from xquant.calibrators.calibrator import Stage
from xquant.calibrators.collect import collect
from xquant.calibrators.find import find_calibrator
from xquant.quant.codebook import inner_range, outlier_count
from xquant.spec import parse_method

from ..bench.contenders import Models
from ..bench.parts import with_dense
from ..bench.run import bench
from ..bench.trials import Settings
from .printed import Rows
from .setup import Setup
from .states import layers

SHARE = 0.01
"""Of a vector's elements that are outliers."""
MEASURED_FOR = 0.1
"""Seconds that an operation of microseconds is repeated in a round."""
ROUNDS = 9
"""In which the operations take turns."""
ATTENDED = "kvquant-4bit-1%:datatype=nf,scales=online"
"""What table 6 times, too."""


def table15(setup: Setup, printed: Rows) -> Rows:
    """Milliseconds of one token in the middle layer: its projections, the thresholds of its value's outliers,
    and both after each other."""
    every = layers(setup)
    view = every[len(every) // 2]
    width = view.key_weight.shape[1]
    weights = [
        torch.randn(rows, width, dtype=torch.float32, device="cpu").to(view.key_weight)
        for rows in (view.query_heads * view.head_size, view.kv_width, view.kv_width)
    ]
    x = torch.randn(1, width, dtype=torch.float32, device="cpu").to(view.key_weight)
    value = torch.randn(1, view.kv_width, dtype=torch.float32, device="cpu").to(view.key_weight)

    def project() -> None:
        for weight in weights:
            linear(x, weight)

    def find() -> None:
        inner_range(value.float(), -1, outlier_count(SHARE, view.kv_width))

    def both() -> None:
        project()
        find()

    rounds = [[_milliseconds(each) for each in (project, find, both)] for _ in range(ROUNDS)]
    taken = [median(own) for own in zip(*rounds, strict=True)]
    return [
        {**row, "milliseconds": own, "of_projection": own / taken[0]}
        for row, own in zip(printed, taken, strict=True)
    ]


@torch.inference_mode()
def _milliseconds(run: Callable[[], None]) -> float:
    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=MEASURED_FOR).median * 1e3)


class _Timed:
    """A stage that notes the seconds of what it does with the states."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.seconds = stage, 0.0
        self.gradients, self.queries = stage.gradients, stage.queries

    def see(self, position: int, rows: Sample) -> None:
        started = time.perf_counter()
        self.stage.see(position, rows)
        self.seconds += time.perf_counter() - started


def table16(setup: Setup, printed: Rows) -> Rows:
    """Minutes of the passes with gradients, and of all else that calibrating one layer takes: ranges,
    histograms, k-means."""
    count = len(layers(setup))
    taken = {spec: _calibrating(setup, spec) for spec in {row["method"]: None for row in printed}}
    rows = []
    for row in printed:
        passes, others = taken[row["method"]]
        seconds = passes if row["part"] == "Fisher" else others / count
        rows.append({**row, "minutes": seconds / 60})
    return rows


def _calibrating(setup: Setup, spec: str) -> tuple[float, float]:
    """Seconds that the model takes in passes with gradients, and those of all but the model."""
    (samples, _), started = setup.samples, time.perf_counter()
    model = dict.fromkeys((False, True), 0.0)
    calibrator = find_calibrator(parse_method(spec), layers(setup))
    for stage in calibrator.stages(*samples.shape):
        timed, before = _Timed(stage), time.perf_counter()
        collect(setup.model, samples, [(calibrator.codecs, timed)], lambda: None)
        model[stage.gradients] += time.perf_counter() - before - timed.seconds
    calibrator.tensors()
    return model[True], time.perf_counter() - started - sum(model.values())


def table22(setup: Setup, printed: Rows) -> Rows:
    """The parts of the attention of one new token over ``context`` random ones, in one layer."""
    settings = Settings(setup.context, whole=False, parts=True)
    methods = with_dense([parse_method(ATTENDED)])
    models = Models(setup.model)
    found = {row["method"]: row for row in bench(models, methods, settings, setup.progress)}
    full, own = found["full"], found[ATTENDED]
    parts = own["parts"]
    measured = [1e3 * full["attention_ms_per_layer"]]
    measured += [parts[f"{name}_us"] for name in ("packing", "dense", "sparse")]
    measured += [sum(measured[1:])]
    kernels = [full["kernel"], *[own["kernel"]] * 4]
    return [
        {**row, "microseconds": taken, "kernel": kernel}
        for row, taken, kernel in zip(printed, measured, kernels, strict=True)
    ]
