"""KVQuant (arXiv 2401.18079): Tables 1 to 22 and Figures 1 to 4.

Tables 1 to 5, 18 and 19 run ``kvquant`` as it is here. The ablations run it with the paper's ranges of keys
(``scales=offline``), and without a full first token (``sink=0``) where the paper's values are those without.
"""

from dataclasses import replace

from xquant.calibrations import Calibrations

from .experiment import TASKS, Experiment, perplexities
from .kvquant_costs import add_cache_ratios, table6, table7, table8
from .kvquant_figures import METHODS, draw_figure1, draw_figure3, figure1, figure3
from .kvquant_states import PERCENTILES, draw_figure4, figure2, figure4
from .kvquant_tasks import table2, table3, table4
from .kvquant_times import table15, table16, table22
from .kvquant_weights import table5
from .pictures import OUTLIERS
from .printed import Rows
from .setup import Setup


def sized(setup: Setup, printed: Rows) -> Rows:
    """Perplexities of a table that has sizes too."""
    add_cache_ratios(printed)
    return perplexities(setup, printed)


def table21(setup: Setup, printed: Rows) -> Rows:
    """``perplexity`` with a calibration on the text that is given for it, and ``perplexity_generated`` with
    one on a text that the model writes.

    Raises:
        ValueError: no text to calibrate on, and no calibration.
    """
    if setup.calibration_text is None and not setup.calibrations:
        raise ValueError(
            "calibration texts are compared: give --calibration-text FILE, beside which the model writes one"
        )
    specs = [row["method"] for row in printed]
    given = setup.perplexity(specs)
    other = replace(setup, calibration_text=None, calibrations=Calibrations())
    generated = {row.method: row.perplexity for row in other.perplexity(specs).values()}
    return [
        {**row, **given[spec].to_dict(), "perplexity_generated": generated[spec]}
        for row, spec in zip(printed, specs, strict=True)
    ]


EXPERIMENTS = (
    Experiment("kvquant/table1", "KVQuant, int and nf: perplexity", sized),
    Experiment(
        "kvquant/table2",
        "KVQuant and KIVI: passkey retrieval",
        table2,
        needs="",
        metrics=(
            "success",
            "through_store",
            "likelihood",
            "likelihood_through_store",
            "cache_ratio",
        ),
    ),
    Experiment("kvquant/table3", "KVQuant and KIVI: LongBench", table3, **TASKS),
    Experiment("kvquant/table4", "KVQuant and KIVI: RULER", table4, **TASKS),
    Experiment(
        "kvquant/table5",
        "weights quantized too, after SqueezeLLM: perplexity",
        table5,
        keys=("row", "weights", "method"),
        metrics=("perplexity", "ratio", "cache_ratio", "weight_bits"),
    ),
    Experiment(
        "kvquant/table6",
        "attention of one token over 4-bit codes with 1% outliers: time",
        table6,
        needs="",
        metrics=("microseconds", "speedup"),
    ),
    Experiment(
        "kvquant/table7",
        "weights and cache by batch and context: bytes",
        table7,
        needs="",
        counts=True,
        keys=("row", "method", "batch", "length"),
        metrics=("weights_gib", "cache_gib", "cache_ratio"),
    ),
    Experiment(
        "kvquant/table8",
        "KVQuant's cache by context: bytes",
        table8,
        needs="",
        counts=True,
        keys=("row", "method", "length"),
        metrics=("cache_gib", "cache_ratio"),
    ),
    Experiment("kvquant/table9", "keys and values per token or per channel: perplexity", sized),
    Experiment("kvquant/table10", "keys before or after RoPE, per channel: perplexity", sized),
    Experiment("kvquant/table11", "levels: uniform, NormalFloat, three k-means: perplexity", sized),
    Experiment("kvquant/table12", "outliers per vector or per matrix: perplexity", sized),
    Experiment("kvquant/table13", "with and without a full first token: perplexity", perplexities),
    Experiment("kvquant/table14", "ranges of keys online or offline: perplexity", perplexities),
    Experiment(
        "kvquant/table15",
        "outlier thresholds beside the projections: time",
        table15,
        needs="",
        keys=("row",),
        metrics=("milliseconds", "of_projection"),
    ),
    Experiment(
        "kvquant/table16",
        "calibration by stage: time",
        table16,
        needs="",
        keys=("row", "method"),
        metrics=("minutes",),
        counts=True,
    ),
    Experiment("kvquant/table17", "datatypes and shares of outliers: perplexity", sized),
    Experiment("kvquant/table18", "all methods of table 1: perplexity on WikiText-2", sized),
    Experiment("kvquant/table19", "all methods of table 1: perplexity on C4", sized),
    Experiment("kvquant/table20", "keys before or after RoPE, per token: perplexity", perplexities),
    Experiment(
        "kvquant/table21",
        "what KVQuant is calibrated on: perplexity",
        table21,
        metrics=("perplexity", "perplexity_generated"),
        calibration_text=True,
    ),
    Experiment(
        "kvquant/table22",
        "attention of one token by its parts: time",
        table22,
        needs="",
        keys=("row",),
        metrics=("microseconds",),
    ),
    Experiment(
        "kvquant/figure1",
        "KVQuant's parts one by one at 3 bits: perplexity; weights and cache: bytes",
        figure1,
        metrics=("perplexity", "ratio", "weights_gib", "cache_gib_512", "cache_gib_128k"),
        draw=draw_figure1,
    ),
    Experiment(
        "kvquant/figure2",
        "keys before and after RoPE, and values: where the outliers are",
        figure2,
        **OUTLIERS,
    ),
    Experiment(
        "kvquant/figure3",
        "perplexity by context length",
        figure3,
        keys=("method", "length"),
        metrics=("perplexity", "ratio", "kl", "cache_ratio"),
        draw=draw_figure3,
        methods=METHODS,
    ),
    Experiment(
        "kvquant/figure4",
        "how much of their range the magnitudes of keys and values use",
        figure4,
        keys=("layer", "state"),
        metrics=tuple(f"p{p}" for p in PERCENTILES),
        draw=draw_figure4,
    ),
)
