"""The tables of measured figures, by what they are about."""

from . import forms, frontier, gpu, papers, quality, rivals, serving, speed, transform
from .common import TABLES

__all__ = [
    "TABLES",
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
