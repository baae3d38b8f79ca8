"""Adapters: what a method needs to know of a model family."""

from .base import AttentionView, ModelView
from .find import find_decoder, view_model
from .names import layers_of

__all__ = ["AttentionView", "ModelView", "find_decoder", "layers_of", "view_model"]
