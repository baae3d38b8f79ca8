"""The columns of a paper's table: what was measured, and beside it what the paper prints.

Of what a paper prints for many models, those nearest to the measured model are shown; see `nearest`.
"""

import math
import re
from collections.abc import Callable, Sequence

from xquant import parse_method
from xquant_lab.reproduce.experiment import Experiment

from .common import Row, code

WIDEST = 8
"""Columns that a table has, where they can be made so few."""
MULTI_HEAD = "-mha"
"""What the name of a model ends in whose query heads share no keys and values."""
SHARED = re.compile("Llama-3|Mistral|70B")
"""Models of the papers whose query heads share keys and values."""
TEXTS = {"wikitext2": "WikiText-2", "c4": "C4"}
"""What the papers call a text, by a word of its file's path."""
OVER_FULL = {"perplexity": "ratio"}
"""The field that has a metric over that of the full cache: both are in one cell."""
EXTRA = ("same_tokens", "kl")
"""Measured, though no paper prints it: of tasks always shown, else where there is room."""
NAMES = {
    "perplexity": "perplexity (over full)",
    "cache_ratio": "of fp16 cache",
    "code_bits": "bits in codes",
    "bits_per_value": "bits per value",
    "cache_gib": "cache, GiB",
    "cache_gib_512": "cache of 512 tokens, GiB",
    "cache_gib_128k": "cache of 128K tokens, GiB",
    "weights_gib": "weights, GiB",
    "agreement": "answered as full",
    "kl": "KL",
    "through_store": "through the store",
    "likelihood": "digits, nats",
    "likelihood_through_store": "digits through the store, nats",
}
ONE_EACH = "a setting for each task"
"""What a row runs as whose tasks have settings of their own."""

Column = tuple[str, Callable[[Row], str]]


def columns(experiment: Experiment, rows: Sequence[Row], shown: Sequence[Row]) -> list[Column]:
    """Heads and cells of the rows that are ``shown``: two models of the paper if they fit, else one, and
    else that one in the cell of what was measured.

    ``rows`` are all of the results file: ``shown`` may be means of them.
    """
    extra = [name for name in EXTRA if name in shown[0] and name not in experiment.metrics]
    wanted = len(extra) if "task" in experiment.keys else 0
    for many, apart in ((2, True), (1, True), (1, False)):
        found = _columns(experiment, rows, shown[0], many, apart)
        if len(found) + wanted <= WIDEST:
            break
    room = max(WIDEST - len(found), wanted)
    return found + [(_named(name), _ours(name)) for name in extra[:room]]


def _columns(experiment: Experiment, rows: Sequence[Row], first: Row, many: int, apart: bool) -> list[Column]:
    others = [key for key in experiment.keys if key not in ("row", "method") and key in first]
    found: list[Column] = []
    if "row" in experiment.keys:
        found.append(("paper's name", _name(others)))
    elif others:
        found.append((", ".join(others), _name(others)))
    if "method" in first:
        found.append(("run as", _run_as))
    for metric in experiment.metrics:
        if metric in OVER_FULL.values() and OVER_FULL.keys() & set(experiment.metrics):
            continue
        places = chosen(rows, metric, many)
        if places and not apart and metric != experiment.metrics[0]:
            found.append((f"{_named(metric)}, ours / paper's", _both(metric, places)))
            continue
        found.append((_named(metric), _ours(metric)))
        in_order = [where for where in printed_for(rows, metric) if where in places]
        found += [(f"paper: {where}", _papers(metric, where)) for where in in_order]
    return found


def printed_for(rows: Sequence[Row], metric: str) -> list[str]:
    """The models and data sets that the paper prints a metric for."""
    printed = (row.get("paper", {}).get(metric, ()) for row in rows)
    return list(dict.fromkeys(where for places in printed for where in places))


def chosen(rows: Sequence[Row], metric: str, many: int) -> list[str]:
    """The nearest places, and those that further rows are printed for which have none of these."""
    known = nearest(rows, metric)
    found = known[:many]
    for row in rows:
        own = [where for where in known if where in row.get("paper", {}).get(metric, ())]
        if own and not set(own) & set(found):
            found.append(own[0])
    return found


def nearest(rows: Sequence[Row], metric: str) -> list[str]:
    """What the paper prints a metric for, the nearest to what was measured first.

    Other texts are left out where the measured one is among them. The smallest models come first, of these
    the nearest context, and of these the models that share heads as the measured one does. Where XQuant is
    measured, the others are left out: what it keeps depends on that.
    """
    first, text = rows[0], text_of(rows[0])
    methods = (parse_method(row["method"]).name for row in rows if "method" in row)
    formed = any(name.startswith("xquant") for name in methods)

    def other_heads(where: str) -> bool:
        return bool(SHARED.search(where)) == first["model"].endswith(MULTI_HEAD)

    def distance(where: str) -> tuple[float, float, bool]:
        size, context = (re.search(form, where) for form in (r"(\d+)B", r", (\d+)K$"))
        octave = round(math.log2(int(size[1]))) if size else math.inf
        apart = math.log2(1024 * int(context[1]) / first["size"]["context"]) if context else 0
        return octave, abs(apart), other_heads(where)

    found = printed_for(rows, metric)
    of_text = [where for where in found if where.split(", ")[1:2] == [text]] or found
    alike = [where for where in of_text if not (formed and other_heads(where))] or of_text
    return sorted(alike, key=distance)


def text_of(row: Row) -> str:
    """The paper's name of the text that was measured on; empty where there is none that a paper has."""
    file = re.search(r"--text (\S+)", row["environment"]["command"])
    return next((name for word, name in TEXTS.items() if file and word in file[1]), "")


def number(value: object) -> str:
    """A measured value, to four digits."""
    if isinstance(value, float):
        if 0 < abs(value) < 0.001:
            return f"{value:.5f}"
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return "" if value is None else str(value)


def _named(metric: str) -> str:
    return NAMES.get(metric, metric.replace("_", " "))


def _name(others: Sequence[str]) -> Callable[[Row], str]:
    """The paper's name of a row, and its other keys."""

    def cell(row: Row) -> str:
        if "row" not in row:
            return ", ".join(str(row[key]) for key in others)
        return ", ".join([row["row"], *(f"{key} {row[key]}" for key in others)])

    return cell


def _run_as(row: Row) -> str:
    spec = row.get("run_as", row["method"])
    return spec if spec == ONE_EACH else code(spec)


def _ours(metric: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        over = row.get(OVER_FULL.get(metric, ""))
        if over is None:
            return number(row.get(metric))
        error = over * row["difference_error"]
        noise = f"\u00a0±\u00a0{_ratio(error)}" if error else ""
        return f"{number(row[metric])} ({_ratio(over)}{noise})"

    return cell


def _papers(metric: str, where: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        printed = row.get("paper", {})
        value, over = (printed.get(name, {}).get(where) for name in (metric, OVER_FULL.get(metric, "")))
        known = "" if value is None else f"{value:,.6g}"
        return known + ("" if over is None else f" ({_ratio(over)})")

    return cell


def _both(metric: str, places: Sequence[str]) -> Callable[[Row], str]:
    """What was measured, and the first that the paper prints of ``places``."""

    def cell(row: Row) -> str:
        printed = (_papers(metric, where)(row) for where in places)
        return f"{_ours(metric)(row)} / {next(filter(None, printed), 'none')}"

    return cell


def _ratio(value: float) -> str:
    return f"{value:.3f}" if value < 10 else number(float(value))
