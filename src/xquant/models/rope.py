"""Rope: the rotary embedding of a model, asked for the angles of any positions."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from .. import compat
from .rotation import HALVES, Pair, as_halves, form_of, widen
from .weights import home, offloading

NO_FORM = compat.RotaryForm({}, compat.AXES, [])
FAR = 4
"""Times the longest position of a configuration: past every switch of frequencies."""


class Rope:
    """The angles of positions, as `apply_rope` takes them; of a model without a rotary embedding none.

    Some embeddings have other frequencies for long inputs: LongRoPE two sets of them, of which the longest
    position of a forward pass decides (`switches`), dynamic NTK another set for every length (`drifts`). The
    keys that a model gave to its cache keep theirs.
    """

    def __init__(self, rotary: nn.Module | None, config: Any) -> None:
        self._rotary, self._table_form = rotary, HALVES
        self.drifts = self.switches = False
        self._form = NO_FORM
        self.width = 0
        """``R``: channels of a head that RoPE rotates; more where it rotates others by 0."""
        if rotary is None:
            return
        self._form = compat.rotary_form(rotary)
        like = self._like()
        ones = torch.ones(1, 2, dtype=torch.int32, device=like.device)
        table = compat.chosen(self._form, compat.angles(self._copy(), self._form, like, ones))
        self._table_form = form_of(table)
        self.width = as_halves(table, self._table_form)[0].shape[-1]
        longest = int(getattr(config, "max_position_embeddings", 0) or 0)
        if any(buffer.dim() > 1 and len(buffer) == longest for buffer in rotary.buffers()):
            return  # a table of all angles, which ends there: GPT-J
        far = FAR * longest
        near, *others = (self._angle(at) for at in (0, far, 2 * far))
        self.drifts = not torch.equal(*others)
        self.switches = not self.drifts and not torch.equal(near, others[0])
        self._far = far

    def _angle(self, longest: int) -> Tensor:
        """Of position 1 where ``longest`` is in use; the model's own module is left as it is."""
        like = self._like()
        if like.device.type == "meta":
            return torch.zeros(0, dtype=torch.float32, device="cpu")
        positions = torch.tensor([[1, longest]], dtype=torch.int32, device=like.device)
        return self._halves(like, positions)[0][:, 0]

    def _like(self) -> Tensor:
        assert self._rotary is not None
        return torch.empty(0, device=home(self._rotary), dtype=torch.float32)

    def _halves(self, like: Tensor, positions: Tensor) -> Pair:
        return self.halves(compat.angles(self._copy(), self._form, like, positions), like.dtype)

    def halves(self, table: Any, dtype: torch.dtype | None = None) -> Pair:
        """cos and sin ``[B, T, R]`` as `apply_rope` takes them, of the table that a layer is given."""
        table = compat.chosen(self._form, table)
        cos, sin = widen(as_halves(table, self._table_form), self.width)
        return cos.to(dtype), sin.to(dtype)

    def table(self, like: Tensor, count: int, kind: str = "") -> Any:
        """What the model gives to a layer, of a ``kind``, for tokens at positions 1 to ``count``, in the
        dtype and on the device of ``like``; None without a rotary embedding."""
        if self._rotary is None:
            return None
        own = self._like().to(like.dtype)
        positions = torch.arange(1, 1 + count, dtype=torch.int32, device=own.device)[None]
        table = compat.angles(self._copy(), self._form, own, positions, kind)
        if isinstance(table, Tensor):
            return table.to(like.device)
        return tuple(t.to(like.device) for t in table)

    def _copy(self) -> nn.Module:
        """A module that may change its frequencies without the model's own, which others may be using."""
        assert self._rotary is not None
        config = getattr(self._rotary, "config", None)
        hook = offloading(self._rotary)  # has all weights of the model
        return copy.deepcopy(self._rotary, {id(config): config, id(hook): hook})

    def __call__(self, like: Tensor, positions: Tensor, long: bool = False) -> Pair:
        """cos and sin ``[B, T, R]`` of integer ``positions`` ``[B, T]``, or of several axes ``[N, B, T]``, in
        the dtype of ``like``.

        As in a forward pass of these positions; ``long``: as in one of a long input.
        """
        if self._rotary is None:
            none = like.new_empty(*positions.shape[-2:], 0)
            return none, none
        if not (self.switches or self.drifts):
            return self.halves(compat.angles(self._rotary, self._form, like, positions), like.dtype)
        count = positions.shape[1]
        if long:
            positions = torch.nn.functional.pad(positions, (0, 1), value=self._far)
        cos, sin = self._halves(like, positions)
        return cos[:, :count], sin[:, :count]

    @property
    def axes(self) -> int:
        """``N``: how many axes positions of images have."""
        return self._form.axes

    @property
    def takes_axes(self) -> bool:
        """Whether it can be asked for angles of positions of several axes."""
        return self._rotary is not None

    def is_long(self, positions: Tensor) -> bool:
        """Whether a forward pass of these ``positions`` ``[B, T]`` has the frequencies for long inputs."""
        if not self.switches or positions.shape[1] == 0:
            return False
        probe = torch.cat([torch.ones_like(positions[:1, :1]), positions.max().view(1, 1)], 1)
        cos, _ = self._halves(torch.empty(0, device=positions.device, dtype=torch.float32), probe)
        return not torch.equal(cos[:, 0], self._angle(0).to(cos.device))
