"""The tables of measured figures, by what they are about."""

from . import papers, quality, serving, speed
from .common import TABLES

__all__ = ["TABLES", "papers", "quality", "serving", "speed"]
