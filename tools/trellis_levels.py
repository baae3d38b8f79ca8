"""Find the levels of the trellis codes, and write src/xquant/quant/trellis.safetensors.

Lloyd's iteration: normal numbers get their best codes, then every level moves to the mean of the numbers
whose codes select it. It begins with the levels in any order, so that those which may follow each other lie
apart. It takes a quarter of an hour on two cores.

The levels of codes without a trellis are written too: finding them takes seconds, in which every process that
asks for one would wait.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from xquant.quant.levels import NORMAL, TAILED, Mixture, best_levels
from xquant.quant.trellis import TRELLIS, WIDTHS, WINDOW, Width, name_of, search, unit_of

TO = Path(__file__).parents[1] / "src/xquant/quant/trellis.safetensors"
ROW = 128
"""Numbers of a row."""
TAILED_FROM = 4
"""Bits from which levels are for `TAILED` numbers, as those without a trellis are."""


def numbers(rows: int, mixture: Mixture, generator: torch.Generator) -> Tensor:
    """Rows of numbers ``[1, ROW, rows]`` of a density."""
    x = torch.randn(1, ROW, rows, generator=generator)
    share, size = (torch.tensor(each) for each in zip(*mixture, strict=True))
    which = torch.multinomial(share, x.numel(), replacement=True, generator=generator)
    return x * size[which].view(x.shape)


def first_levels(width: Width, generator: torch.Generator) -> Tensor:
    count = 2**WINDOW
    normal = torch.special.ndtri((torch.arange(count, dtype=torch.float64) + 0.5) / count).float()
    return torch.stack([normal[torch.randperm(count, generator=generator)] for _ in range(width.tokens)], 1)


def selected(x: Tensor, width: Width, levels: Tensor, error: float) -> tuple[Tensor, float]:
    """The windows of numbers ``[1, n, R]``, and the mean squared error of their levels."""
    windows = width.windows(search(x, None, width, levels, unit_of(levels, error)))
    back = levels[windows].movedim(-1, 2).flatten(1, 2)
    return windows, float((back - x).square().mean())


def found(width: Width, rows: int, rounds: int) -> tuple[Tensor, float]:
    """Levels ``[2**WINDOW, tokens]``, and their mean squared error for other normal numbers."""
    generator = torch.Generator().manual_seed(0)
    mixture = TAILED if width.bits >= TAILED_FROM else NORMAL
    levels, error = first_levels(width, generator), 2.0 ** (-2 * width.bits)
    for _ in range(rounds):
        x = numbers(rows, mixture, generator)
        windows, error = selected(x, width, levels, error)
        parts = x.unflatten(1, (-1, width.tokens)).movedim(2, -1).reshape(-1, width.tokens)
        where = windows.flatten().long()
        count = torch.bincount(where, minlength=len(levels)).float()[:, None]
        total = torch.zeros_like(levels).index_add_(0, where, parts)
        levels = torch.where(count > 0, total / count.clamp(min=1), levels)
    _, error = selected(numbers(4 * rows, NORMAL, generator), width, levels, error)
    return levels, error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1024, help="of 128 numbers, in each round")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--to", type=Path, default=TO)
    given = parser.parse_args()
    from safetensors.torch import save_file

    tensors = {
        name_of(width): best_levels(width.code, TAILED)[:, None].contiguous()
        for width in WIDTHS
        if not width.trellis
    }
    errors = []
    for width in TRELLIS:
        levels, error = found(width, given.rows, given.rounds)
        print(
            f"{width.bits:g} bits: {error:.5f}, highest level {float(levels.abs().max()):.2f}",
            flush=True,
        )
        tensors[name_of(width)] = levels
        errors.append(error)
    save_file(tensors | {"error": torch.tensor(errors)}, given.to)


if __name__ == "__main__":
    main()
