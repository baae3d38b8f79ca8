"""Finds the points of `xquant.quant.vectors.Pairs`: those of least error for two standard normal numbers.

    python tools/pair_points.py src/xquant/quant/pairs.safetensors

Lloyd's iteration on a grid of the density, from points on a spiral that are as dense as the best ones are.
"""

import math
from pathlib import Path

import click
import torch
from safetensors.torch import save_file
from torch import Tensor

REACH, STEP = 5.5, 0.04
ROUNDS = 400


def grid() -> tuple[Tensor, Tensor]:
    """Numbers ``[M, 2]`` and how likely each is, ``[M]``."""
    line = torch.arange(-REACH, REACH, STEP, dtype=torch.float64) + STEP / 2
    places = torch.cartesian_prod(line, line)
    weights = (-places.square().sum(-1) / 2).exp()
    return places, weights / weights.sum()


def spiral(count: int) -> Tensor:
    """Points ``[count, 2]`` as dense as the best ones are: as the root of a normal density."""
    share = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    radius = (-4 * (1 - share).log()).sqrt()
    angle = torch.arange(count, dtype=torch.float64) * math.pi * (3 - 5**0.5)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], -1)


def best(count: int) -> tuple[Tensor, float]:
    """The points, and the mean squared error of a number."""
    places, weights = grid()
    points = spiral(count)
    for _ in range(ROUNDS):
        near = (places @ points.T - points.square().sum(-1) / 2).argmax(-1)
        mass = torch.zeros(count, dtype=torch.float64).index_add(0, near, weights)
        sums = torch.zeros(count, 2, dtype=torch.float64).index_add(0, near, places * weights[:, None])
        moved = sums / mass[:, None]
        done = bool((moved - points).abs().max() < 1e-6)
        points = moved
        if done:
            break
    error = ((places - points[near]).square().sum(-1) * weights).sum() / 2
    return points.float(), float(error)


@click.command()
@click.argument("target", type=click.Path(path_type=Path))
def main(target: Path) -> None:
    found = {}
    for bits in (2, 3, 4):
        found[f"{bits} bits"], error = best(4**bits)
        click.echo(f"{bits} bits: error {error:.5f}")
    save_file(found, target)


if __name__ == "__main__":
    main()
