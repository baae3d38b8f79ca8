"""Rope: the rotary embedding of a model, asked for the angles of any positions."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from .. import compat

FAR = 4
"""Times the longest position of a configuration: past every switch of frequencies."""

Pair = tuple[Tensor, Tensor]


class Rope:
    """The angles of positions.

    Some embeddings have other frequencies for long inputs: LongRoPE two sets of them, of which the longest
    position of a forward pass decides (`switches`), dynamic NTK another set for every length (`drifts`). The
    keys that a model gave to its cache keep theirs.
    """

    def __init__(self, rotary: nn.Module, config: Any) -> None:
        self._rotary, self._form = rotary, compat.rotary_form(rotary)
        far = FAR * int(getattr(config, "max_position_embeddings", 0) or 0)
        near, *others = (self._angle(at) for at in (0, far, 2 * far))
        self.drifts = not torch.equal(*others)
        self.switches = not self.drifts and not torch.equal(near, others[0])
        self._far = far

    def _angle(self, longest: int) -> Tensor:
        """Of position 1 where ``longest`` is in use; the model's own module is left as it is."""
        tensors = [*self._rotary.parameters(), *self._rotary.buffers()]
        device = tensors[0].device if tensors else None
        if device is not None and device.type == "meta":
            return torch.zeros(0)
        positions = torch.tensor([[1, longest]], dtype=torch.int32, device=device)
        cos, _ = compat.angles(self._copy(), self._form, torch.empty(0, device=device), positions)
        return cos[:, 0]

    def _copy(self) -> nn.Module:
        """A module that may change its frequencies without the model's own, which others may be using."""
        config = getattr(self._rotary, "config", None)
        return copy.deepcopy(self._rotary, {id(config): config})

    def __call__(self, like: Tensor, positions: Tensor, long: bool = False) -> Pair:
        """cos and sin of integer ``positions`` ``[B, T]``, ``[B, T, R]`` each, in the dtype of ``like``.

        As in a forward pass of these positions; ``long``: as in one of a long input.
        """
        if not (self.switches or self.drifts):
            return compat.angles(self._rotary, self._form, like, positions)
        count = positions.shape[1]
        if long:
            positions = torch.nn.functional.pad(positions, (0, 1), value=self._far)
        cos, sin = compat.angles(self._copy(), self._form, like, positions)
        return cos[:, :count], sin[:, :count]

    def is_long(self, positions: Tensor) -> bool:
        """Whether a forward pass of these ``positions`` ``[B, T]`` has the frequencies for long inputs."""
        if not self.switches or positions.shape[1] == 0:
            return False
        probe = torch.cat([torch.ones_like(positions[:1, :1]), positions.max().view(1, 1)], 1)
        cos, _ = compat.angles(
            self._copy(), self._form, torch.empty(0, device=positions.device), probe
        )
        return not torch.equal(cos[:, 0], self._angle(0).to(cos.device))
