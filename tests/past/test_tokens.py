from typing import Any

import torch

from xquant.past.tokens import TokenIndex


class Still:
    """An embedding that turns nothing, the same for every length."""

    switches = False

    def __call__(self, like: torch.Tensor, positions: torch.Tensor, long: bool = False) -> Any:
        return positions, positions


class Switching:
    """Four numbers of a position, times ten where a pass reaches position 8: as LongRoPE's two sets."""

    switches = True

    def __call__(self, like: torch.Tensor, positions: torch.Tensor, long: bool = False) -> Any:
        angles = positions[..., None] * torch.arange(1, 5) * (10 if long else 1)
        return angles.to(like.dtype), -angles.to(like.dtype)

    def is_long(self, positions: torch.Tensor) -> bool:
        return int(positions.max()) >= 8


def switched(*chunks: int) -> TokenIndex:
    """Two sequences of the same positions, in chunks."""
    tokens, start = TokenIndex(0, Switching()), 0
    for length in chunks:
        columns = torch.arange(start, start + length).expand(2, -1)
        tokens.append(columns, torch.ones(2, length, dtype=torch.bool))
        start += length
    return tokens


def angles(*factors: int) -> torch.Tensor:
    """What `Switching` gives for tokens of these factors, ``[2, T, 4]``."""
    each = torch.arange(len(factors)) * torch.tensor(factors)
    return (each[:, None] * torch.arange(1, 5)).float().expand(2, -1, -1)


LIKE = torch.empty(0)


def test_tokens_keep_the_frequencies_of_the_pass_that_they_came_in() -> None:
    for chunks, factors in (
        ((5, 3), (1,) * 8),
        ((9, 2), (10,) * 11),
        ((5, 2, 3, 1), (1,) * 7 + (10,) * 4),
    ):
        tokens, want = switched(*chunks), angles(*factors)
        assert tokens.uniform == (len(set(factors)) == 1)
        cos, sin = tokens.rope(LIKE)
        assert torch.equal(cos, want) and torch.equal(sin, -want)
        cos, sin = tokens.rope_of_newest(LIKE, 1)
        assert torch.equal(cos, want[:, -1:]) and torch.equal(sin, -want[:, -1:])
        cos, sin = tokens.rope_by_channel()
        assert torch.equal(cos, want[..., :2].mT) and torch.equal(sin, -want[..., :2].mT)
        if tokens.uniform:
            cos, sin = tokens.rope_at(torch.tensor([[3], [4]]))
            assert torch.equal(cos[0, 0], factors[0] * 3 * torch.arange(1, 5).float())
            assert torch.equal(sin, -cos)


def test_frequencies_follow_every_change() -> None:
    tokens = switched(5, 2, 3, 1)
    other = TokenIndex(0, Switching())
    other.take(tokens)
    state = tokens.snapshot()
    tokens.crop(9)
    assert torch.equal(tokens.rope(LIKE)[0], angles(*(1,) * 7 + (10,) * 2))
    tokens.crop(7)
    assert tokens.uniform
    assert torch.equal(tokens.rope(LIKE)[0], angles(*(1,) * 7))
    assert torch.equal(tokens.rope_at(torch.tensor([[3]]))[0][0, 0], 3 * torch.arange(1, 5).float())
    tokens.append(torch.tensor([[7], [7]]), torch.ones(2, 1, dtype=torch.bool))
    assert torch.equal(tokens.rope(LIKE)[0], angles(*(1,) * 8))
    tokens.select(torch.tensor([1, 0, 0]))
    assert tokens.rope(LIKE)[0].shape == (3, 8, 4)
    tokens.restore(state)
    for one in (tokens, other):
        assert torch.equal(one.rope(LIKE)[0], angles(*(1,) * 7 + (10,) * 4))


def test_the_epoch_changes_with_the_tokens_that_are_there() -> None:
    tokens = index(12)
    seen = [tokens.epoch]
    state = tokens.snapshot()
    tokens.append(torch.full((2, 1), 12), torch.ones(2, 1, dtype=torch.bool))
    assert tokens.epoch == seen[0]
    for change in (
        lambda: tokens.crop(9),
        lambda: tokens.select(torch.tensor([1, 0])),
        lambda: tokens.restore(state),
        tokens.reset,
        tokens.reset,
    ):
        change()
        assert tokens.epoch not in seen
        seen.append(tokens.epoch)


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
        assert tokens.nbytes == 2 * 12 * 10


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
