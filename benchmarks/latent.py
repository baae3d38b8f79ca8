"""A decoding step over latents (MLA) at the shape of DeepSeek-V3: one layer, random weights, on the CPU.

    python benchmarks/latent.py --json benchmarks/results/latent.json

transformers' cache keeps the latents, and its layer makes keys and values of all of them in every step. Ours
keeps them packed and attends to them as they are. Steps of both take turns; the median of each is kept.
"""

import statistics
import time
from typing import Any

import click
import torch
from transformers import DeepseekV3Config, DeepseekV3Model, DynamicCache

from xquant import KVCache
from xquant.results import stamp, write_json


def one_layer() -> Any:
    """A model of one dense layer with the attention of DeepSeek-V3, in bf16."""
    sizes = {"num_hidden_layers": 1, "first_k_dense_replace": 1, "intermediate_size": 64}
    config = DeepseekV3Config(**sizes, vocab_size=64, pad_token_id=0)
    torch.manual_seed(0)
    return DeepseekV3Model(config).to(torch.bfloat16).eval()


def fill(cache: Any, model: Any, tokens: int) -> Any:
    """The cache with so many random latents and rotated parts."""
    config, generator = model.config, torch.Generator().manual_seed(1)
    latent, rotated = (
        torch.randn(1, 1, tokens, size, generator=generator).bfloat16()
        for size in (config.kv_lora_rank, config.qk_rope_head_dim)
    )
    if isinstance(cache, KVCache):
        positions = torch.arange(tokens)[None]
        cache.index.append(positions, torch.ones_like(positions, dtype=torch.bool))
        cache.compressed[0].append_rows(torch.cat([latent, rotated], -1)[:, 0])
        cache.finish()
    else:
        cache.update(latent, rotated, 0)
    return cache


@click.command()
@click.option("--tokens", default=8192, show_default=True)
@click.option("--rounds", default=9, show_default=True)
@click.option("--spec", "specs", multiple=True, default=("kivi-4bit", "kivi-2bit"), show_default=True)
@click.option("--json", "target", help="A results file to write.")
@torch.inference_mode()
def main(tokens: int, rounds: int, specs: tuple[str, ...], target: str | None) -> None:
    """Time a decoding step of one layer with transformers' cache and with ours."""
    model = one_layer()
    known = KVCache(model, specs[0])
    model(torch.ones(1, 12, dtype=torch.long), past_key_values=known)  # shows what the layer makes of latents
    caches = {"transformers": fill(DynamicCache(config=model.config), model, tokens)}
    caches |= {spec: fill(KVCache(model, spec), model, tokens) for spec in specs}
    times: dict[str, list[float]] = {name: [] for name in caches}
    for _ in range(rounds + 1):
        for name, cache in caches.items():
            begin = time.perf_counter()
            model(torch.ones(1, 1, dtype=torch.long), past_key_values=cache)
            times[name].append(1e3 * (time.perf_counter() - begin))
    rows = []
    own = caches["transformers"].layers[0]
    for name, cache in caches.items():
        ours = isinstance(cache, KVCache)
        rows.append(
            {
                "method": name,
                "tokens": tokens,
                "kernel": cache.kernel if ours else "",
                "ms_per_step": statistics.median(times[name][1:]),
                "cache_bytes": cache.nbytes if ours else own.keys.nbytes + own.values.nbytes,
            }
        )
        print(rows[-1])
    if target:
        write_json(target, stamp(rows))


if __name__ == "__main__":
    main()
