"""Tables of answers: passkeys, GSM8K, RULER and other tasks."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from xquant import parse_method

from .common import Row, code, markdown, rows, table


def of_methods(found: list[Row]) -> dict[str, list[Row]]:
    """The rows of each method."""
    methods: dict[str, list[Row]] = {}
    for row in found:
        methods.setdefault(row["method"], []).append(row)
    return methods


def passkeys(found: list[Row], cell: Callable[[list[Row]], str]) -> str:
    """A line a method, a column a context, in which ``cell`` says what was found."""
    contexts = sorted({row["context"] for row in found})
    body = []
    for method, own in of_methods(found).items():
        asked = ([row for row in own if row["context"] == context] for context in contexts)
        body.append([code(method), *(cell(each) if each else "" for each in asked)])
    return markdown(["method", *(f"{context:,}" for context in contexts)], body)


def counted(own: list[Row]) -> str:
    """Numbers found, of those asked for."""
    return f"{sum(row['found'] for row in own)} of {sum(row['samples'] for row in own)}"


def counted_and_lost(own: list[Row]) -> str:
    """Numbers found, and the depths at which some were not."""
    lost = ", ".join(f"{row['depth']:g}" for row in own if row["found"] < row["samples"])
    return counted(own) + (f" (lost at {lost})" if lost else "")


def counted_and_likely(own: list[Row]) -> str:
    """Numbers found, and the mean logarithm of the probability of the right ones' digits."""
    return f"{counted(own)} ({fmean(row['likelihood'] for row in own):.2f})"


@table
def evaluation_passkey() -> str:
    return passkeys(rows("passkey-smollm2"), counted_and_lost)


@table
def evaluation_passkey_exact() -> str:
    found = rows("passkey-exact-smollm2") + rows("passkey-exact-8k-smollm2")
    return passkeys(found, counted_and_likely)


@table
def passkey_errors() -> str:
    """Of each method and calibration: numbers found in both ways of reading, and in brackets the mean
    logarithm of the probability of the right ones' digits; then squared errors over squared norms, of the
    number's digits and of the median token. Errors were measured with the first calibration alone."""
    asked: dict[tuple[str, str], dict[str, list[Row]]] = {}
    errors: dict[str, dict[str, list[Row]]] = {}
    for row in rows("passkey-errors-smollm2"):
        if row["part"] == "asked":
            by_way = asked.setdefault((row["method"], row["calibrated_on"]), {})
            by_way.setdefault(row["attend"], []).append(row)
        else:
            errors.setdefault(row["method"], {}).setdefault(row["states"], []).append(row)
    body = []
    for (method, text), ways in asked.items():
        cells = [code(method), text if parse_method(method).needs_calibration else ""]
        for attend in ("chunk", "store"):
            cells.append(counted_and_likely(ways[attend]))
        own = errors.pop(method, {})
        for states in ("keys", "values"):
            for of in ("digits", "median"):
                cells.append(f"{fmean(row[of] for row in own[states]):.2%}" if own else "")
        body.append(cells)
    head = ["method", "calibrated on", "read exactly", "through the store"]
    head += ["keys: digits", "all", "values: digits", "all"]
    return markdown(head, body)


def tasks(*files: str) -> str:
    """Scores of results files of `xquant eval`: a line a method, a column a task and metric; then how many
    rows were answered as with the full cache. Of the metrics of TruthfulQA those of BLEU."""
    found = [row for file in files for row in rows(file)]
    columns: dict[str, dict[str, str]] = {}
    same: dict[str, dict[str, str]] = {}
    for row in found:
        # LongBench names its score twice.
        if row["metric"].startswith("rouge") or row["metric"].endswith(("_diff", "_score")):
            continue
        made_to = f" {row['context']:,}" if row["context"] else ""
        value = f"{row['value']:.3f}" + ("" if row["stderr"] is None else f" ± {row['stderr']:.3f}")
        metric = "" if row["metric"] == str(row["context"]) else f", {row['metric']}"
        columns.setdefault(f"{row['task']}{made_to}{metric}", {})[row["method"]] = value
        if row["agreement"] is not None:
            same.setdefault(f"{row['task']}{made_to}, as full", {})[row["method"]] = (
                f"{row['agreement']} of {row['n']}"
            )
    columns |= same
    methods = dict.fromkeys(row["method"] for row in found)
    return markdown(
        ["method", *columns],
        ([code(m), *(cells.get(m, "") for cells in columns.values())] for m in methods),
    )


@table
def evaluation_truthfulqa() -> str:
    return tasks("truthfulqa-smollm2")


@table
def evaluation_gsm8k() -> str:
    return tasks("gsm8k-smollm2")


@table
def evaluation_gsm8k_followed() -> str:
    """How closely a cache follows the full one on problems of GSM8K."""
    found = [row for row in rows("gsm8k-followed-smollm2") if row["metric"].endswith("strict-match")]
    body = ([code(method), *followed(own)] for method, own in of_methods(found).items())
    return markdown(["method", *FOLLOWED], body)


@table
def evaluation_ruler() -> str:
    """Means of six tasks by length, and how closely a cache follows the full one on all these prompts."""
    found = rows("ruler-smollm2")
    contexts = sorted({row["context"] for row in found})
    head = ["method", *(f"{context:,}" for context in contexts), *FOLLOWED]
    body = (
        [code(method), *mean_scores(own, "context", contexts), *followed(own)]
        for method, own in of_methods(found).items()
    )
    return markdown(head, body)


@table
def evaluation_ruler_tasks() -> str:
    """Means of all lengths by task."""
    found = rows("ruler-smollm2")
    names = list(dict.fromkeys(row["task"] for row in found))
    body = ([code(method), *mean_scores(own, "task", names)] for method, own in of_methods(found).items())
    return markdown(["method", *map(code, names)], body)


FOLLOWED = "answered as full", "same of 32 tokens", "KL"


def followed(own: list[Row]) -> tuple[str, str, str]:
    """The cells of `FOLLOWED`: how closely one method follows the full cache over all prompts of its rows."""
    prompts = sum(row["n"] for row in own)
    same, kl = (sum(row[of] * row["n"] for row in own) / prompts for of in ("same_tokens", "kl"))
    return f"{sum(row['agreement'] for row in own)} of {prompts}", f"{same:.1f}", f"{kl:.4f}"


def mean_scores(own: list[Row], by: str, values: Sequence[Any]) -> list[str]:
    """Mean scores of one method where ``by`` has each of ``values``, with their standard errors."""
    cells = []
    for value in values:
        scores = [row for row in own if row[by] == value]
        deviation = math.sqrt(sum(row["stderr"] ** 2 for row in scores)) / len(scores)
        cells.append(f"{fmean(row['value'] for row in scores):.2f} ± {deviation:.2f}")
    return cells


@table
def evaluation_longbench() -> str:
    return tasks("longbench-smollm2")
