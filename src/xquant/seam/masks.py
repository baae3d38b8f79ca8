"""What the attention mask of a forward pass tells a cache.

Padding is known from a mask over tokens, ``[B, T]``, alone. One of four axes says which query sees which
token, and nothing else: in a tree of drafts the last query sees few of the new tokens, and none is padding.
"""

from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..past import finite
from ..past.tokens import visible

NAME = "attention_mask"
SHOWN = (
    "this cache holds padding that the attention mask does not hide, and what is stored of padding is not"
    " exact: give the mask of all tokens, those that are held included"
)


def mask_among(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The attention mask that a module is called with, by name or by position."""
    if NAME in kwargs or len(args) < 2:
        return kwargs.get(NAME)
    kind: Any = type(module)
    at = _position(kind)
    return None if at is None or at >= len(args) else args[at]


@lru_cache(maxsize=64)
def _position(kind: Any) -> int | None:
    names = list(signature(kind.forward).parameters)[1:]
    return names.index(NAME) if NAME in names else None


def over_tokens(mask: Any) -> bool:
    """Whether a mask is of tokens, ``[B, T]``: then it tells which are padding."""
    return isinstance(mask, Tensor) and mask.dim() == 2


@dataclass(frozen=True, eq=False)
class PassMask:
    """The attention mask of a forward pass with ``t`` new tokens after ``T`` that are held."""

    given: Any = None
    """As the decoder was given it: ``[B, T + t]``, 0 for padding; ``[B, H, t, T + t]``, bool or added to
    scores, where ``B``, ``H`` and ``t`` may be 1; such masks by kind of layer; or None."""
    tokens: Tensor | None = None
    """The mask over tokens, ``[B, T + t]``, where the decoder or the model around it was given one."""

    @classmethod
    def of(cls, given: Any, outer: Any, batch: int, tokens: int) -> "PassMask":
        """Of what the decoder was ``given``, and the model around it (``outer``)."""
        if over_tokens(given):
            return cls(given, given)
        known = over_tokens(outer) and outer.shape == (batch, tokens)
        return cls(given, outer if known else None)

    @property
    def is_plain(self) -> bool:
        """Whether the decoder was told of padding, or of nothing: then each token sees those before it."""
        return self.given is None or over_tokens(self.given)

    def real(self, held: int, batch: int, length: int) -> Tensor | None:
        """Which of the new tokens are not padding, bool ``[B, t]``; None where nothing tells."""
        if self.tokens is None:
            return None
        new = self.tokens[:, held : held + length].bool()
        return pad(new, (0, length - new.shape[1])).expand(batch, length)

    def asks(self, length: int, device: torch.device) -> bool:
        """Whether the host may look at it: a decode step asks a device nothing."""
        return length > 1 or finite.asked_at_once(device)

    @property
    def _tensors(self) -> list[Tensor]:
        masks = self.given.values() if isinstance(self.given, dict) else (self.given, self.tokens)
        return [mask for mask in masks if isinstance(mask, Tensor)]

    def check(self, batch: int, held: int, length: int) -> None:
        """Refuse a mask of other sizes.

        Raises:
            ValueError: it is.
        """
        mask, total = self.given, held + length
        if not isinstance(mask, Tensor):
            return
        if mask.dim() == 2 and mask.shape[0] != batch:
            raise ValueError(f"the attention mask is of {mask.shape[0]} sequences, and the input has {batch}")
        if mask.dim() != 4:
            return
        sizes = zip(mask.shape, (batch, mask.shape[1], length, total), strict=True)
        if any(size not in (1, wanted) for size, wanted in sizes):
            raise ValueError(
                f"the attention mask is {list(mask.shape)}, and not [{batch}, 1, {length}, {total}]:"
                f" {length} new tokens that see {total}"
            )

    def hides(self, real: Tensor) -> bool:
        """Whether tokens that are held are hidden now, which were ``real`` (bool ``[B, T]``) as they came."""
        return self.tokens is not None and bool((real & ~self._of_held(real)).any())

    def _of_held(self, real: Tensor) -> Tensor:
        """The mask over the tokens that are held, bool, like ``real`` ``[B, T]``."""
        assert self.tokens is not None
        held = real.shape[1]
        seen = self.tokens[:, :held].bool().to(real.device)
        return pad(seen, (0, held - seen.shape[1]))

    def shows_padding(self, real: Tensor) -> bool:
        """Whether a new token sees padding that a cache holds: what is stored of padding is not exact.

        Args:
            real: bool ``[B, T]``: which of the tokens that are held are not padding.
        """
        if bool(real.all()):
            return False
        held = real.shape[1]
        if self.tokens is not None:
            seen = [self._of_held(real)]
        elif self.given is None:
            seen = [torch.ones_like(real)]
        else:
            whole = [mask for mask in self._tensors if mask.dim() == 4 and mask.shape[-1] > held]
            seen = [visible(mask[..., :held]).flatten(1, 2).any(1) for mask in whole]
        return any(bool((each.to(real.device) & ~real).any()) for each in seen)
