"""The experiments of all papers, by id."""

from . import crosslayer, kvquant, xquant
from .experiment import Experiment

PAPERS = (xquant, crosslayer, kvquant)
EXPERIMENTS: dict[str, Experiment] = {
    experiment.id: experiment for paper in PAPERS for experiment in paper.EXPERIMENTS
}
