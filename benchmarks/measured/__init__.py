"""The tables of measured figures, by what they are about."""

from . import papers, quality, rivals, serving, speed, transform
from .common import TABLES

__all__ = ["TABLES", "papers", "quality", "rivals", "serving", "speed", "transform"]
