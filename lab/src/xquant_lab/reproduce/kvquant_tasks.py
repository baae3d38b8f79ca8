"""KVQuant on tasks: passkeys, LongBench and RULER."""

from statistics import fmean

from xquant.spec import parse_method

from ..evals.passkey import DEPTHS, Prompts, passkey
from .experiment import scores
from .kvquant_costs import add_cache_ratios
from .printed import Rows
from .setup import Setup

PASSKEYS = 50
"""Prompts of a context, as in the paper."""


def table2(setup: Setup, printed: Rows) -> Rows:
    """The share of hidden numbers that are found, over ``limit`` prompts (50 without) of ``context`` tokens,
    as many at every depth.

    ``success`` is the paper's: only the answer reads the store. For ``through_store`` the prompt does so too.
    ``likelihood`` and ``likelihood_through_store`` are of the number's digits, in nats.
    """
    add_cache_ratios(printed)
    methods = [parse_method(row["method"]) for row in printed]
    samples = max(round((setup.limit or PASSKEYS) / len(DEPTHS)), 1)
    prompts = Prompts([setup.context], DEPTHS, samples)
    calibrations = setup.calibrated(methods)
    journal = setup.journal({"samples": samples})
    rows = [{**row, "cache_ratio": setup.cache_ratio(row["method"])} for row in printed]
    for attend, success, likelihood in (
        ("chunk", "success", "likelihood"),
        ("store", "through_store", "likelihood_through_store"),
    ):
        asked = passkey(setup.model, setup.tokenizer, methods, prompts, attend, calibrations, journal)
        for row in rows:
            own = [depth for depth in asked if depth.method == row["method"]]
            row["n"] = sum(depth.samples for depth in own)
            row[success] = sum(depth.found for depth in own) / row["n"]
            row[likelihood] = fmean(depth.likelihood for depth in own)
    return rows


def table3(setup: Setup, printed: Rows) -> Rows:
    """LongBench, with all methods on all tasks: the paper's value is not known of each."""
    known = {(row["method"], row["task"]): row for row in printed}
    methods = {row["method"]: row["row"] for row in printed}
    tasks = dict.fromkeys(row["task"] for row in printed)
    rows = [
        {"row": name, "method": method, "task": task, "paper": {"score": {}}} | known.get((method, task), {})
        for method, name in methods.items()
        for task in tasks
    ]
    return scores(setup, rows, metric="score", scale=100)


def table4(setup: Setup, printed: Rows) -> Rows:
    """RULER with prompts of ``context`` tokens, after which lm-eval names its metric."""
    add_cache_ratios(printed)
    return scores(setup, printed, metric=str(setup.context), scale=100)
