"""The tables and figures of the papers measured again, on any model, beside what the papers print.

One file a paper declares its experiments; ``figures/`` holds the papers' own figures.
"""

from . import crosslayer, kvquant, xquant
from .experiment import Experiment

PAPERS = (xquant, crosslayer, kvquant)
EXPERIMENTS: dict[str, Experiment] = {
    experiment.id: experiment for paper in PAPERS for experiment in paper.EXPERIMENTS
}


def find_experiment(name: str) -> Experiment:
    """The experiment of that id.

    Raises:
        ValueError: there is none.
    """
    if name not in EXPERIMENTS:
        raise ValueError(f"there is no experiment '{name}': 'xquant reproduce --list' shows them")
    return EXPERIMENTS[name]


__all__ = ["EXPERIMENTS", "Experiment", "find_experiment"]
