"""The tables of measured figures, by what they are about."""

from . import forms, gpu, papers, quality, rivals, serving, speed, transform
from .common import TABLES

__all__ = ["TABLES", "forms", "gpu", "papers", "quality", "rivals", "serving", "speed", "transform"]
