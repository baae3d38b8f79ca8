"""Adapters: what a method needs to know of a model family."""

from .base import AttentionView, ModelView
from .find import find_decoder, view_model

__all__ = ["AttentionView", "ModelView", "find_decoder", "view_model"]
