"""Asking an attention layer what it gives to its cache, and which of its modules that comes from.

The layer is run on a few random tokens up to the call of its cache. Keys that are not rotated, and values,
are then found again among what its modules gave, channel by channel: so a projection that is fused in
whatever order, a norm and a rotary embedding need no table of families.
"""

import inspect
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from .weights import home, put_back

TOKENS = 11
"""Two channels that are equal for so many random tokens are one channel. No model has 11 key/value heads."""


@dataclass
class Given:
    """What a layer gave to its cache of `TOKENS` tokens, and its modules on the way."""

    x: Tensor  # [1, T, d], its input
    key: Tensor  # [1, G, T, D]
    value: Tensor  # [1, G', T, D']
    modules: dict[nn.Module, tuple[Tensor, Tensor]]  # inputs and outputs of those right below it


class _Enough(Exception):
    """A layer has called its cache: nothing after that matters."""


class _Recorder(DynamicCache):
    """Ends a layer at the call of its cache."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise _Enough(key_states, value_states)


@torch.no_grad()
def ask(attention: nn.Module, config: Any, hidden: int, dtype: torch.dtype, table: Any, first: int) -> Given:
    """Run ``attention`` on random inputs of ``hidden`` channels.

    Args:
        config: of its decoder.
        table: of its rotary embedding, for `TOKENS` tokens; None where it is given none.
        first: position of the first token; where it is 0, that of all tokens.

    Raises:
        ValueError: it did not call a cache; the message says why.
    """
    device = home(attention)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, TOKENS, hidden, generator=generator, device="cpu", dtype=torch.float32).to(
        device, dtype
    )
    positions = torch.arange(first, first + TOKENS, device=device)[None]
    positions = positions if first else torch.zeros_like(positions)
    seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def see(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            seen[module] = args[0], output

    training = attention.training
    with ExitStack() as stack:
        stack.callback(attention.train, training)
        stack.callback(put_back, attention)
        attention.eval()
        for child in attention.children():
            stack.callback(child.register_forward_hook(see).remove)
        try:
            attention(x, **_arguments(attention, _Recorder(config=config), table, positions))
        except _Enough as enough:
            key, value = enough.args
            return Given(x, key, value, seen)
        except Exception as error:  # whatever a layer says that was called in another way
            said = next(iter(str(error).splitlines()), "")
            raise ValueError(f"{type(error).__name__}: {said}"[:120]) from None
    raise ValueError("it keeps no keys and values")


def _arguments(attention: nn.Module, cache: DynamicCache, table: Any, positions: Tensor) -> dict[str, Any]:
    """Arguments by the names that transformers has for them; of what else is required, None."""
    caches = ("past_key_values", "past_key_value", "layer_past", "cache_params", "cache")
    known = {
        **dict.fromkeys(caches, cache),
        **dict.fromkeys(("position_embeddings", "freqs_cis", "position_embedding"), table),
        **dict.fromkeys(("position_ids", "cache_position"), positions),
        "use_cache": True,
    }
    _, *names = inspect.signature(attention.forward).parameters.values()
    wanted = [p for p in names if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    given = {p.name: known.get(p.name) for p in wanted if p.name in known or p.default is p.empty}
    if any(p.kind is p.VAR_KEYWORD for p in names):
        given["position_ids"] = positions
    return given


def by_token(states: Tensor) -> Tensor:
    """``[T, channels]`` of heads ``[1, G, T, D]`` or ``[1, T, G, D]``, or of rows ``[1, T, channels]``."""
    if states.dim() == 4 and states.shape[1] != TOKENS:
        states = states.transpose(1, 2)
    return states.reshape(TOKENS, -1) if states.numel() % TOKENS == 0 else states.new_empty(TOKENS, 0)


def find_channels(wanted: Tensor, among: Tensor) -> Tensor | None:
    """Which channels of ``among`` ``[T, N]`` the channels ``wanted`` ``[T, C]`` are, int64 ``[C]``; None
    where some are not there, to the bit."""
    places = {column.tobytes(): at for at, column in enumerate(_columns(among))}
    found = [places.get(column.tobytes()) for column in _columns(wanted)]
    if any(place is None for place in found):
        return None
    return torch.tensor(found, dtype=torch.long, device="cpu")


def _columns(states: Tensor) -> Iterator[Any]:
    # fp64 holds every other type exactly; zeros of both signs are one.
    yield from (states.T.double() + 0.0).contiguous().cpu().numpy()


def as_slice(channels: Tensor) -> slice | Tensor:
    """A slice where channels follow each other: it costs no copy."""
    start, stop = int(channels[0]), int(channels[0]) + len(channels)
    return slice(start, stop) if channels.equal(torch.arange(start, stop, device="cpu")) else channels
