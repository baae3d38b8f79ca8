"""Layers that transformers keeps itself, as tensors: sliding windows, and states of linear attention."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import compat
from ..models import AttentionView
from .contents import Contents

WINDOWS = "DynamicSlidingWindowLayer"
PLAIN = "DynamicLayer"
"""Classes of layers that transformers keeps itself and whose state is known here."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Types that rows may have; under autocast they are not the model's."""


class Reader(Protocol):
    """Tensors that were stored, each taken once, as it is expected; what is not is damage."""

    def __contains__(self, name: str) -> bool: ...

    def take(
        self, name: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int | None, ...] | None
    ) -> Tensor:
        """A tensor of one of these types and of this shape, None for any, or for any length."""

    def finite(
        self, name: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int | None, ...] | None
    ) -> Tensor:
        """The same, without NaN and infinity."""

    def check(self, right: bool, why: str) -> None:
        """Raise where something is not ``right``."""


class Tensors:
    """A `Reader` of tensors at hand.

    Args:
        damage: makes the error of what they should have been.
    """

    def __init__(self, held: Mapping[str, Tensor], damage: Callable[[str], Exception] = ValueError) -> None:
        self._left, self._damage = dict(held), damage

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(
        self, name: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int | None, ...] | None
    ) -> Tensor:
        self.check(name in self._left, f"it has no '{name}'")
        tensor = self._left.pop(name)
        fits = shape is None or (
            len(shape) == tensor.dim()
            and all(wanted in (None, size) for wanted, size in zip(shape, tensor.shape, strict=True))
        )
        self.check(fits and tensor.dtype in dtypes, f"'{name}' is of another type or shape")
        return tensor

    def finite(
        self, name: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int | None, ...] | None
    ) -> Tensor:
        tensor = self.take(name, dtypes, shape)
        self.check(bool(tensor.isfinite().all()), f"'{name}' holds NaN or infinity")
        return tensor

    def check(self, right: bool, why: str) -> None:
        if not right:
            raise self._damage(why)

    def check_all_read(self) -> None:
        self.check(not self._left, f"it holds '{min(self._left, default='')[:80]}' too")


def held(contents: Contents) -> dict[str, Tensor]:
    """Keys and values ``[B, G, T, D]``, and states of linear attention, by number of the layer and name.

    Raises:
        ValueError: a layer of a kind whose state is not known.
    """
    found: dict[str, Tensor] = {}
    for number, layer in {**contents.others, **contents.linear_states}.items():
        if not contents.index.length or compat.is_empty(layer):
            continue
        if why := unknown(layer):
            raise ValueError(f"this cache cannot be saved: transformers keeps layer {number} in {why}")
        states = compat.states_of(layer)
        if states is None:
            states = {"keys": layer.keys.clone(), "values": layer.values.clone()}
        found |= {f"{number}.{name}": state for name, state in states.items()}
    return found


def unknown(layer: Any) -> str:
    """What a layer is kept in whose state is not known; empty where it is."""
    known = compat.is_empty(layer) or compat.states_of(layer) is not None
    if known or type(layer).__name__ in (WINDOWS, PLAIN):
        return ""
    return f"a {type(layer).__name__}, of which more than keys and values may matter"


def held_alone(contents: Contents, sequence: int) -> dict[str, Tensor]:
    """The same ``[1, ...]`` of one sequence, without padding, as if it had been alone.

    Raises:
        ValueError: as of `held`; a sequence with padding among its newest tokens.
    """
    real = contents.index.real[sequence]
    tokens, found = int(real.sum()), held(contents)
    for name, tensor in found.items():
        own = tensor[sequence : sequence + 1]
        layer = contents.layers[int(name.partition(".")[0])]
        if name.endswith((".keys", ".values")):
            window = layer.sliding_window - 1 if type(layer).__name__ == WINDOWS else tokens
            newest = min(tokens, window)
            if not bool(real[len(real) - newest :].all()):
                raise ValueError("a sequence has padding among its newest tokens, in a sliding window")
            own = own[:, :, own.shape[2] - newest :]
        found[name] = own
    return found


def fill(contents: Contents, reader: Reader, batch: int, tokens: int, recording: Any = ()) -> None:
    """Fill the layers that transformers keeps itself, which are empty, with what `held` gave.

    Args:
        recording: the numbers of sliding windows that keep tokens past their window until the next crop.
    """
    home, model = contents.compressed[0].codec.view.device, contents.attachment.view
    for view in model.layers:
        if view.index in model.skipped and not compat.is_empty(contents.layers[view.index]):
            shape = batch, view.kv_heads, tokens
            _fill_window(contents.layers[view.index], view, reader, shape, view.index in recording)
    for number, layer in {**dict(enumerate(contents.layers)), **contents.linear_states}.items():
        if compat.states_of(layer) is not None:
            _fill_states(number, layer, home, reader, batch)


def _fill_window(
    layer: Any, view: AttentionView, reader: Reader, shape: tuple[int, int, int], records: bool
) -> None:
    """Fill a layer of keys and values of the last tokens, or of all; ``shape``: sequences, heads, tokens."""
    batch, heads, tokens = shape
    sliding = type(layer).__name__ == WINDOWS
    recording = sliding and records
    least = min(tokens, layer.sliding_window - 1) if sliding else tokens
    most = least if sliding and not recording else tokens
    keys, values = (
        reader.take(f"{view.index}.{name}", FLOATS, (batch, heads, None, size)).to(view.device, copy=True)
        for name, size in (("keys", view.head_size), ("values", view.value_size))
    )
    fits = (
        least <= keys.shape[2] <= most and keys.shape[:3] == values.shape[:3] and keys.dtype == values.dtype
    )
    reader.check(fits, f"layer {view.index} holds more or fewer tokens than it must")
    known = not recording or hasattr(layer, "activate_past_recording")
    reader.check(known, f"layer {view.index} keeps tokens past its window")
    if recording:
        layer.activate_past_recording()
    layer.update(keys, values)
    if sliding:
        layer.cumulative_length = tokens


def _fill_states(number: int, layer: Any, home: torch.device, reader: Reader, batch: int) -> None:
    """Fill the states of linear attention of a layer."""
    states = {}
    for place in range(layer.number_of_states):
        for name in (f"conv.{place}", f"recurrent.{place}"):
            if f"{number}.{name}" in reader:
                state = reader.finite(f"{number}.{name}", FLOATS, None)
                right = state.dim() > 1 and len(state) == batch
                reader.check(right, f"'{number}.{name}' is of other sequences")
                states[name] = state.to(home)
    reader.check(bool(states), f"layer {number} has no states")
    compat.put_states(layer, states)
