"""Models of a known shape with random weights: whole, or a few of their attention layers."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from xquant import __version__
from xquant.analysis.shapes import shape_config
from xquant.calibration import Calibration, Expected
from xquant.codecs import fingerprint
from xquant.methods import Method
from xquant.seam.hooks import attach

from . import capacity

SHAPE_LAYERS = 8
"""Layers of a shape. Several are timed one after the other, so that none finds its codes in a CPU cache."""


def shaped_model(
    name: str,
    layers: int = SHAPE_LAYERS,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Any:
    """A model of a few layers with the attention of a known shape, a tiny MLP and a tiny vocabulary.

    Raises:
        ValueError: no such shape.
    """
    return _build(_attention_config(name, layers), device, dtype)


def whole_model(name: str, device: str | torch.device, dtype: torch.dtype) -> Any:
    """A model of a known shape with all its layers and random weights.

    Raises:
        ValueError: no such shape.
    """
    return _build(shape_config(name), device, dtype)


def fitting_layers(
    name: str,
    methods: Sequence[Method],
    dtype: torch.dtype,
    size: tuple[int, int],
    room: float,
) -> int:
    """How many attention layers of a shape fit beside the full cache and those of all ``methods``: all, a
    half, a quarter ... of them, at least one. With many layers, work that is done once a forward pass
    counts for a layer as it does in the whole model.

    Args:
        size: context and batch of the caches.
        room: bytes that they may take.

    Raises:
        ValueError: no such shape.
    """
    layers: int = shape_config(name).num_hidden_layers
    while layers > 1:
        config = _attention_config(name, layers)
        if capacity.together(config, methods, dtype, *size) <= room:
            break
        layers //= 2
    return layers


def _attention_config(name: str, layers: int) -> Any:
    return shape_config(name, intermediate_size=32, vocab_size=32, num_hidden_layers=layers)


def _build(config: Any, device: str | torch.device, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def random_tensor(expected: Expected) -> torch.Tensor:
    """A vector of zeros, or a larger tensor of normal numbers that as a matrix keep the size of the rows they
    are multiplied with."""
    if len(expected.shape) == 1:
        return expected.blank()
    numbers = torch.randn(expected.shape, dtype=torch.float32, device="cpu")
    numbers = (numbers * expected.shape[-1] ** -0.5).clamp(expected.least, expected.most)
    return (numbers.sort(0).values if expected.rising else numbers).to(expected.dtype)


def random_calibration(model: Any, method: Method) -> Calibration:
    """A calibration of random numbers, for a model without a tokenizer.

    Of transform coding, no channel is worth more than another, so all have codes: the slowest that a budget
    can be.
    """
    views = attach(model).view.compressed
    tensors = {name: random_tensor(wanted) for name, wanted in method.expected(views).items()}
    made_for = method.calibrated_as, fingerprint(views)
    return Calibration(tensors, *made_for, text="random numbers", version=__version__)
