"""The longest context that a model knows."""

from typing import Any

from . import compat


def positions_of(model: Any) -> int | None:
    """Tokens of that context, where the model's configuration says so."""
    positions: int | None = getattr(compat.text_config(model), "max_position_embeddings", None)
    return positions


def check_context(model: Any, tokens: int, made_of: str = "") -> None:
    """Raise ValueError where ``tokens`` are more than the model has positions.

    Args:
        made_of: what the tokens are, for the message: "a prompt of 3 tokens and 5 new ones".
    """
    positions = positions_of(model)
    if positions is not None and tokens > positions:
        detail = f" ({made_of})" if made_of else ""
        raise ValueError(f"a context of {tokens}{detail} is past the model's {positions} positions")
