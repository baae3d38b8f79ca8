"""Attention over packed keys before RoPE, by how heads turn: halves, neighbours, or a part of each.

    python benchmarks/rope.py --json benchmarks/results/rope.json

Models of one shape with random weights and states, decoding steps in turns. What a step does with the order
of a head's channels is part of the time.
"""

import statistics
import time
from typing import Any

import click
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from xquant import parse_method
from xquant.kernels.call import AttentionCall
from xquant.results import stamp, write_json
from xquant_lab.bench.contenders import Compressed

SHAPE: dict[str, Any] = {
    **{"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4},
    **{"intermediate_size": 64, "vocab_size": 64, "num_hidden_layers": 8, "pad_token_id": 0},
    **{"bos_token_id": 1, "eos_token_id": 2},
}
KINDS: dict[str, Any] = {
    "halves": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "neighbours": lambda: CohereForCausalLM(CohereConfig(**SHAPE)),
    "neighbours of half a head": lambda: GlmForCausalLM(GlmConfig(**SHAPE, head_dim=64)),
}


class Step(Compressed):
    """A step's attention, with what the seam does before it."""

    def attend(self) -> None:
        query, key, value = self._newest
        for layer in self.cache.compressed:
            view = layer.codec.view
            own = view.as_in_cache(query), view.as_in_cache(key), value
            assert self.cache.attend(view.index, AttentionCall(*own, None, 0.125, None)) is not None
        self.cache.finish()


@click.command()
@click.option("--tokens", default=8192, show_default=True)
@click.option("--rounds", default=31, show_default=True)
@click.option("--method", "spec", default="kivi-4bit", show_default=True)
@click.option("--json", "target", help="A results file to write.")
@torch.inference_mode()
def main(tokens: int, rounds: int, spec: str, target: str | None) -> None:
    """Time attention of a decoding step by how heads turn."""
    steps = {}
    for kind, make in KINDS.items():
        torch.manual_seed(0)
        model = make().eval()
        steps[kind] = Step(model, parse_method(spec), tokens, 1, None, "auto")
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    for _ in range(rounds + 1):
        for kind, step in steps.items():
            begin = time.perf_counter()
            step.attend()
            times[kind].append(1e3 * (time.perf_counter() - begin))
    ratios = {
        kind: statistics.median(
            own / halves for own, halves in zip(times[kind][1:], times["halves"][1:], strict=True)
        )
        for kind in steps
    }
    rows = [
        {
            "turns": kind,
            "method": spec,
            "tokens": tokens,
            "kernel": step.setting,
            "ms": statistics.median(times[kind][1:]),
            "of_halves": ratios[kind],
        }
        for kind, step in steps.items()
    ]
    for row in rows:
        print(row)
    if target:
        write_json(target, stamp(rows))


if __name__ == "__main__":
    main()
