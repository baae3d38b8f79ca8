"""Attention over a packed cache by the size of a head, a thread alone, and beside it the full cache's.

    python benchmarks/heads.py --json benchmarks/results/heads.json

Models with random weights and states that differ in the size of a head alone. Decoding steps take turns, and
the least time of many counts, so that what else runs on the machine tells little. What a size costs a channel
is compared with the next multiple of 32.
"""

import time
from typing import Any

import click
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from xquant import parse_method
from xquant.results import stamp, write_json
from xquant_lab.bench.contenders import Compressed, Contender, Full

SIZES = (64, 72, 80, 88, 96, 104, 112, 120, 128)
METHODS = (
    "kivi-4bit",
    "kivi-2bit",
    "kivi-4bit:rope=post",
    "int8",
    "nf4",
    "kvquant-4bit-1%:scales=online,datatype=nf",
    "quarot-4bit",
    "xquant-4bit",
)
SHAPE: dict[str, Any] = {
    **{"hidden_size": 512, "intermediate_size": 64, "vocab_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 8, "num_key_value_heads": 2},
}


def model_of(size: int) -> LlamaForCausalLM:
    """A model whose heads have ``size`` channels."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, head_dim=size)).eval()


def least(steps: dict[Any, Contender], rounds: int) -> dict[Any, float]:
    """The least milliseconds that the attention of a step takes, of ``rounds`` in turns."""
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(rounds + 1):
        for key, step in steps.items():
            begin = time.perf_counter()
            step.attend()
            best[key] = min(best[key], 1e3 * (time.perf_counter() - begin))
    return best


@click.command()
@click.option("--tokens", default=4096, show_default=True)
@click.option("--rounds", default=60, show_default=True)
@click.option("--method", "specs", multiple=True, default=METHODS, show_default=True)
@click.option("--size", "sizes", multiple=True, type=int, default=SIZES, show_default=True)
@click.option("--json", "target", help="A results file to write.")
@torch.inference_mode()
def main(
    tokens: int, rounds: int, specs: tuple[str, ...], sizes: tuple[int, ...], target: str | None
) -> None:
    """Time attention of a decoding step by the size of a head."""
    torch.set_num_threads(1)
    rows = []
    for spec in specs:
        steps: dict[int, Contender] = {}
        full: dict[int, Contender] = {}
        for size in sizes:
            model, method = model_of(size), parse_method(spec)
            full[size] = Full(model, "sdpa", tokens, 1)
            steps[size] = Compressed(model, method, tokens, 1, None, "auto")
        best, of_full = least(steps, rounds), least(full, rounds // 4)
        for size, step in steps.items():
            whole = -(-size // 32) * 32
            row = {
                "method": spec,
                "head_size": size,
                "tokens": tokens,
                "kernel": step.setting,
                "ms": best[size],
                "of_full": best[size] / of_full[size],
                "of_next_32": best[size] * whole / (size * best[whole]) if whole in best else None,
            }
            rows.append(row)
            click.echo(row)
    if target:
        write_json(target, stamp(rows))


if __name__ == "__main__":
    main()
