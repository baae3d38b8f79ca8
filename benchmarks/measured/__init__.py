"""The tables of measured figures, by what they are about."""

from . import quality, speed
from .common import TABLES

__all__ = ["TABLES", "quality", "speed"]
