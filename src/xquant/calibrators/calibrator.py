"""The protocol of a calibrator: it gathers the statistics that a method needs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..methods import LayerCodec


@dataclass
class Rows:
    """Keys and values of one layer and one sample of ``T`` tokens, as the method packs them."""

    key: Tensor  # [T, C]
    value: Tensor  # [T, C]
    key_gradient: Tensor | None  # of the mean loss per token, the shapes of key and value
    value_gradient: Tensor | None
    ids: Tensor  # of the tokens, int64 [T]
    query: Tensor | None = None  # after RoPE, its channels in the order of the cache [T, H*D]


class Stage(Protocol):
    """One pass over the samples."""

    @property
    def gradients(self) -> bool:
        """Whether `see` needs the gradients of the next sample. They take twice as long as all else."""
        ...

    queries: bool
    """Whether it needs the queries."""

    def see(self, position: int, rows: Rows) -> None:
        """Take one sample at the compressed layer ``position``, counted from the bottom."""
        ...


class Calibrator(Protocol):
    """Gathers what a method needs in one pass over the samples, or in several."""

    @property
    def codecs(self) -> Sequence[LayerCodec]:
        """One codec a layer, whose `features` and `encode` make the rows that `Stage.see` is given."""
        ...

    def stages(self, samples: int, length: int) -> Iterator[Stage]:
        """The passes over ``samples`` of ``length`` tokens. The next is asked for when the one before has
        seen all samples.

        Raises:
            ValueError: there are too few tokens.
        """
        ...

    def tensors(self) -> dict[str, Tensor]:
        """What the artifact holds, after the last stage; named as in `Calibration`.

        Raises:
            ValueError: the samples do not determine it.
        """
        ...
