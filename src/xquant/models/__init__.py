"""Adapters: what a method needs to know of a model family."""

from .base import AttentionView, ModelView
from .find import view_model

__all__ = ["AttentionView", "ModelView", "view_model"]
