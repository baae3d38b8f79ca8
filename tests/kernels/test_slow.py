"""Pairs that turn slowly within a block, and scores with keys of which only the others are built."""

from typing import Any

import pytest
import torch
from torch import Tensor

from support.attention_cases import TOLERANCE, Case, error, filled
from xquant.kernels.cpu import library as native
from xquant.kernels.slow import slow_pairs
from xquant.past.angles import Within

PATHS = native.isas()


def within(pairs: int, base: float = 1e4, block: int = 128) -> Within:
    angles = torch.arange(block)[:, None] * base ** -(torch.arange(pairs) / pairs)
    return Within((angles.cos(), angles.sin()))


@pytest.mark.parametrize(("size", "rows"), [(64, 1), (64, 3), (128, 4)])
def test_waves_describe_how_slow_pairs_turn(size: int, rows: int) -> None:
    given = within(size // 2)
    found = slow_pairs(given, size, rows)
    assert found is not None
    assert found.built + rows * len(found.wave) < size
    pairs = (size - found.built) // 2
    for table, factors in zip(given.angles, (found.cos, found.sin), strict=True):
        assert (found.wave.T @ factors[:, :pairs] - table[:, -pairs:]).abs().max() < 1e-3
        assert not factors[:, pairs:].any()


def test_channels_that_do_not_turn_are_the_slowest() -> None:
    found = slow_pairs(within(16), 64, 1)
    assert found is not None and found.built < 32
    of_still: Tensor = found.wave.T @ found.cos[:, (64 - found.built) // 2 - 1]
    assert torch.allclose(of_still, torch.ones(128), atol=1e-3)


def test_there_are_none_where_nothing_is_gained() -> None:
    assert slow_pairs(within(32), 64, 48) is None
    assert slow_pairs(within(4, 1.0), 8, 8) is None


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "options",
    [
        {"head_size": 64, "kv_heads": 4, "group_heads": 1},
        {"head_size": 128, "group_heads": 4, "batch": 2, "mask": "bool"},
        {"head_size": 64, "turned": 0.5},
    ],
)
@pytest.mark.parametrize(
    "spec", ["xquant-4bit:sink=2", "xquant-3bit:form=mha", "tc-8bit:sink=2", "tc-6bit:group=48"]
)
@torch.no_grad()
def test_scores_are_those_of_keys_that_are_built(spec: str, options: dict[str, Any], path: str) -> None:
    case = Case(spec, path=path, tokens=300, layers=2, **options)
    assert error(case, filled(case)) < TOLERANCE


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("spec", ["xquant-4bit:group=32,sink=2", "tc-8bit:group=32,sink=2"])
@torch.no_grad()
def test_keys_are_built_where_positions_jump_within_a_block(spec: str, path: str) -> None:
    case = Case(spec, path=path)
    cache = filled(case)
    cache.index.positions[:, 40:] += 7
    cache.index.epoch += 1
    cache.index.forget()
    assert error(case, cache) < TOLERANCE
