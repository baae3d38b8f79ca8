"""What an experiment is, and those that many tables of the papers are."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from xquant.spec import parse_method

from .printed import KEYS, Rows, add_ratios, printed_rows, read_figures
from .setup import Setup

AVERAGE = "average"
"""What a table calls the mean over its tasks."""


@dataclass(frozen=True)
class Experiment:
    """A table or figure of a paper, measured again."""

    id: str
    """The paper's file and the table in it, as in ``xquant/table1``."""
    title: str
    run: Callable[[Setup, Rows], Rows]
    """From the rows that the paper prints to the measured ones, which keep what was printed."""
    needs: str = "text"
    """Besides a model: a ``text``, the ``data`` of tasks, or nothing."""
    keys: tuple[str, ...] = KEYS
    """The fields that tell rows apart."""
    metrics: tuple[str, ...] = ("perplexity", "ratio", "cache_ratio")
    """The measured fields that are shown."""
    draw: Callable[[Rows], Mapping[str, Any]] | None = None
    """Pictures of the rows by name, as matplotlib figures."""
    counts: bool = False
    """Whether it only counts bytes, so that nothing has to be calibrated."""
    like: str = ""
    """The table whose printed values are meant, where it is another than that of the id."""
    methods: tuple[str, ...] = ()
    """What it runs, where the paper prints no rows that say so."""
    calibration_text: bool = False
    """Whether a text to calibrate on, or a calibration, has to be given."""

    @property
    def paper(self) -> str:
        """The paper and its arXiv id."""
        figures = read_figures(self.id.partition("/")[0])
        return f"{figures['paper']}, arXiv {figures['arxiv']}"

    @property
    def printed(self) -> Rows:
        """The rows that the paper prints; none where it has a picture."""
        paper, _, table = self.id.partition("/")
        return printed_rows(paper, self.like or table)

    @property
    def calibrates(self) -> bool:
        """Whether one of its methods needs a calibration."""
        printed = (row["method"] for row in self.printed if "method" in row)
        methods = (*self.methods, *printed)
        wanting = any(parse_method(method).needs_calibration for method in methods)
        return wanting and not self.counts


TASKS: dict[str, Any] = {
    "needs": "data",
    "keys": (*KEYS, "task"),
    "metrics": ("score", "cache_ratio", "agreement", "same_tokens", "kl"),
}
"""Of an experiment that runs `scores`."""


def perplexities(setup: Setup, printed: Rows) -> Rows:
    """The perplexity of each method of a table."""
    measured = setup.perplexity([row["method"] for row in printed])
    add_ratios(printed)
    return [{**row, **measured[row["method"]].to_dict()} for row in printed]


def scores(setup: Setup, printed: Rows, metric: str, scale: float = 1) -> Rows:
    """The score of each method on each task of a table: lm-eval's ``metric``, times ``scale``.

    Where a model can answer next to nothing, other fields tell methods apart: ``agreement``, the share of
    rows answered as with the full cache, and ``same_tokens`` and ``kl`` of `evals.agreement`. ``average`` is
    over the other tasks; sizes are of ``context`` tokens.
    """
    specs, tasks = (list(dict.fromkeys(row[key] for row in printed)) for key in ("method", "task"))
    tasks = [task for task in tasks if task != AVERAGE]
    found = setup.tasks(specs, tasks, metric)
    rows = []
    for row in printed:
        meant = tasks if row["task"] == AVERAGE else [row["task"]]
        answered = [found[row["method"], task] for task in meant]
        measured = {
            "score": scale * fmean(one.value for one in answered),
            "agreement": fmean((one.agreement or 0) / one.n for one in answered),
            **{name: fmean(getattr(one, name) for one in answered) for name in ("same_tokens", "kl")},
            "n": sum(one.n for one in answered),
            "cache_ratio": setup.cache_ratio(row["method"]),
        }
        rows.append({**row, **measured})
    return rows
