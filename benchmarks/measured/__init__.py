"""The tables of measured figures, by what they are about."""

from . import gpu, papers, quality, rivals, serving, speed, transform
from .common import TABLES

__all__ = ["TABLES", "gpu", "papers", "quality", "rivals", "serving", "speed", "transform"]
