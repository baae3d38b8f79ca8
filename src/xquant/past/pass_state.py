"""PassState: what one layer of a growing past holds only within a forward pass."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class PassState:
    """What a layer holds only within a forward pass, for the layers above it and for attention."""

    predicted: list[tuple[int, Tensor]] = field(default_factory=list)
    """Predictions of the tokens that were encoded, each with the number of its first token."""
    sealed_from: int | None = None
    """The first token that was sealed; None where none was."""
    recalled: Tensor | None = None
    """What the codec recalled; held only where the layer above needs it."""
    accumulated: Tensor | None = None
    """What the layer above predicts from."""
    fresh: Tensor | None = None
    """With ``through_store``, the tail before it was sealed."""
    decoded: Tensor | None = None
    """In the lowest layer of a span that is coded together: the decoded rows of all its layers."""
