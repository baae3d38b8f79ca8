"""Decoding several sequences at a time: of one prompt, whose blocks are shared or not, and padded ones.

    python benchmarks/answers.py --context 8192 --batch 16 --method kivi-4bit --json results.json

The model is smollm2. The full cache and the method's hold random states of as many tokens, in these ways:

- ``apart``: every sequence has blocks of its own;
- ``together``: the sequences begin with one prompt, and share its blocks, as after
  `batch_repeat_interleave` or `generate(num_return_sequences=...)`;
- ``padded``: blocks of their own, and left padding, from none in the first sequence to half of the context
  in the last.

They decode a token in turn, round by round, and are cropped to their length after it. Ratios are taken round
by round: how many times as fast as the full cache with the faster of transformers' sdpa and eager attention,
and as ``apart``.
"""

import statistics
import time
from typing import Any

import click
import torch

from xquant import KVCache, load_model
from xquant.results import stamp, write_json
from xquant_lab.bench.contenders import Full, Models, fill

FULL, APART, TOGETHER, PADDED = "full", "apart", "together", "padded"
ATTENTIONS = "sdpa", "eager"


@click.command()
@click.option("--context", "contexts", multiple=True, default=[8192], show_default=True)
@click.option("--batch", "batches", multiple=True, default=[16], show_default=True)
@click.option("--method", default="kivi-4bit", show_default=True)
@click.option("--way", "ways", multiple=True, default=[APART, TOGETHER, PADDED], show_default=True)
@click.option("--rounds", default=15, show_default=True)
@click.option("--dtype", default="float32", show_default=True)
@click.option("--weights", default="dense", show_default=True, help="Or as-stored: in the file's 4 bits.")
@click.option("--json", "target", required=True)
@torch.inference_mode()
def main(
    contexts: tuple[int, ...],
    batches: tuple[int, ...],
    method: str,
    ways: tuple[str, ...],
    rounds: int,
    dtype: str,
    weights: str,
    target: str,
) -> None:
    kind = getattr(torch, dtype)
    model, _ = load_model("smollm2", dtype=kind, weights=weights)
    models = Models(model)
    rows: list[dict[str, Any]] = []
    for context in contexts:
        for batch in batches:
            held: dict[str, tuple[Any, Any]] = {}  # the model and the cache of each
            for attention in ATTENTIONS:
                full = Full(models.plain(kind), attention, context, batch)
                held[attention] = full.model, full.cache
            attached = models.attached(kind)
            for way in ways:
                held[way] = attached, _filled(attached, method, context, batch, way)
            times: dict[str, list[float]] = {name: [] for name in held}
            for number in range(rounds + 1):
                for name, pair in held.items():
                    seconds = _step(*pair, context, batch, name)
                    times[name] += [seconds] if number else []
            best = min(ATTENTIONS, key=lambda name: statistics.median(times[name]))
            times[FULL] = times[best]
            for name in (FULL, *ways):
                row = {"method": method, "context": context, "batch": batch, "way": name}
                row |= {"ms_per_step": statistics.median(times[name]) * 1e3, "rounds": rounds}
                for other in (FULL, APART):
                    if other in times:
                        pairs = zip(times[other], times[name], strict=True)
                        row[f"speedup_vs_{other}"] = statistics.median(a / b for a, b in pairs)
                if name == FULL:
                    row["tried"] = {each: statistics.median(times[each]) * 1e3 for each in ATTENTIONS}
                else:
                    row["cache_bytes"] = held[name][1].report().cache_bytes
                rows.append(row)
                click.echo(
                    f"{context:6} x {batch:3} {name:10} {row['ms_per_step']:8.1f} ms,"
                    f" {row['speedup_vs_full']:5.2f} of full,"
                    f" {row.get('speedup_vs_apart', 1):5.2f} of apart"
                )
            del held
    write_json(target, stamp(rows, model="smollm2", dtype=dtype, weights=weights))


def _filled(model: Any, method: str, context: int, batch: int, way: str) -> KVCache:
    cache = KVCache(model, method)
    fill(cache, context, 1 if way == TOGETHER else batch)
    if way == TOGETHER:
        cache.batch_repeat_interleave(batch)
    if way == PADDED:
        cache.index.real &= torch.arange(context) >= _padding(context, batch)
    return cache


def _padding(context: int, batch: int) -> torch.Tensor:
    """Tokens ``[B, 1]`` of padding of each sequence."""
    return torch.linspace(0, context // 2, batch).long()[:, None]


def _step(model: Any, cache: Any, context: int, batch: int, way: str) -> float:
    """Seconds that one token of every sequence takes."""
    mask = torch.ones(batch, context + 1, dtype=torch.long)
    if way == PADDED:
        mask[:, :context] = torch.arange(context) >= _padding(context, batch)
    ids = torch.zeros(batch, 1, dtype=torch.long)
    start = time.perf_counter()
    model(ids, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1)
    found = time.perf_counter() - start
    cache.crop(-1)
    return found


if __name__ == "__main__":
    main()
