from typing import Any

import torch

from xquant.tokens import TokenIndex


class Still:
    """An embedding that turns nothing, the same for every length."""

    switches = False

    def __call__(self, like: torch.Tensor, positions: torch.Tensor, long: bool = False) -> Any:
        return positions, positions


def index(*chunks: int, pad: int = 5, sinks: int = 3) -> TokenIndex:
    """Two sequences, the second left-padded, that arrive in chunks."""
    tokens, start = TokenIndex(sinks, Still()), 0
    for length in chunks:
        columns = torch.arange(start, start + length).expand(2, -1)
        tokens.append(columns, columns >= torch.tensor([[0], [pad]]))
        start += length
    return tokens


def test_sinks_are_the_first_real_tokens_of_each_sequence() -> None:
    for chunks in ((12,), (1,) * 12, (4, 2, 6)):
        tokens = index(*chunks)
        assert tokens.sink.nonzero().tolist() == [[0, 0], [0, 1], [0, 2], [1, 5], [1, 6], [1, 7]]
        excluded = tokens.excluded(0, 12)
        assert excluded is not None
        assert excluded.sum(1).tolist() == [3, 8]
        assert tokens.excluded(8, 12) is None
        assert tokens.nbytes == 2 * 12 * 6


def test_what_is_cropped_can_come_again() -> None:
    tokens = index(12)
    tokens.crop(6)
    columns = torch.arange(6, 12).expand(2, -1)
    tokens.append(columns, torch.ones(2, 6, dtype=torch.bool))
    assert torch.equal(tokens.sink, index(12).sink)


def test_sequences_are_selected_and_repeated() -> None:
    tokens = index(12)
    tokens.select(torch.tensor([1, 1, 0]))
    assert tokens.batch == 3
    assert tokens.real.sum(1).tolist() == [7, 7, 12]
