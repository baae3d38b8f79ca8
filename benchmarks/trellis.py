"""Errors of the codes of `tc` for normal numbers, and the time to find and to read them.

    python benchmarks/trellis.py --json results.json

Native sealing and decoding of blocks of 128 tokens, on one thread, medians of interleaved rounds. Scales,
gains and the order of channels are found as well. "plain" has the levels of Lloyd and Max.
"""

import statistics
import time

import click
import torch

from xquant.kernels import cpu
from xquant.quant.levels import normal_error, normal_levels
from xquant.quant.ranked import Ranked
from xquant.quant.trellis import WIDTHS
from xquant.results import stamp, write_json

BLOCKS, TOKENS, CHANNELS = 16, 128, 256


@click.command()
@click.option("--rounds", default=9, show_default=True)
@click.option("--json", "target", required=True)
@torch.inference_mode()
def main(rounds: int, target: str) -> None:
    torch.set_num_threads(1)
    x = torch.randn(BLOCKS, TOKENS, CHANNELS, generator=torch.Generator().manual_seed(0))
    usual, packer = torch.zeros(CHANNELS, dtype=torch.int16), cpu.best().packer
    back = torch.empty_like(x)
    sealing: list[list[float]] = [[] for _ in WIDTHS]
    reading: list[list[float]] = [[] for _ in WIDTHS]
    for _ in range(rounds):
        for i in range(len(WIDTHS)):
            counts = tuple(CHANNELS * (j == i) for j in range(len(WIDTHS)))
            quantizer = Ranked(usual, counts)
            started = time.perf_counter()
            packed = packer.pack(quantizer, x, None)
            sealed = time.perf_counter()
            packer.unpack(quantizer, packed, back)
            sealing[i].append(sealed - started)
            reading[i].append(time.perf_counter() - sealed)
    rows = []
    for width, seal, read in zip(WIDTHS, sealing, reading, strict=True):
        whole = width.tokens == 1
        numbers = torch.randn(8, TOKENS, CHANNELS, generator=torch.Generator().manual_seed(1))
        error = (width.decode(width.encode(numbers, None)) - numbers).square().mean().item()
        rows.append(
            {
                "bits": width.bits,
                "error": error,
                "plain": normal_error(normal_levels(width.code)) if whole else None,
                "seal_ns": statistics.median(seal) / x.numel() * 1e9,
                "read_ns": statistics.median(read) / x.numel() * 1e9,
            }
        )
        click.echo(rows[-1])
    write_json(target, stamp(rows, dtype="float32"))


if __name__ == "__main__":
    main()
