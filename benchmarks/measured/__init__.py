"""The tables of measured figures, by what they are about."""

from . import answers, at_rest, forms, frontier, gpu, papers, quality, rivals, serving, speed, transform
from .common import TABLES

__all__ = [
    "TABLES",
    "answers",
    "at_rest",
    "forms",
    "frontier",
    "gpu",
    "papers",
    "quality",
    "rivals",
    "serving",
    "speed",
    "transform",
]
