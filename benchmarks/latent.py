"""A decoding step over latents (MLA) at the shape of DeepSeek-V3: one layer, random weights, on the CPU.

    python benchmarks/latent.py --json benchmarks/results/latent.json

transformers' cache keeps the latents, and its layer makes keys and values of all of them in every step. Ours
keeps them packed and attends to them as they are; `full` does so with latents that are not packed, in torch.
Steps of all take turns; the median of each is kept. Calibrations are of random tokens, without gradients:
their codes and matrix are read as any others are. The second time is of attention alone, with what decodes.
"""

import statistics
import time
from typing import Any

import click
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache

from xquant import KVCache, attach, parse_method
from xquant.calibration import Calibration
from xquant.calibrators.run import calibrate_on
from xquant.methods import Method
from xquant.results import stamp, write_json

SPECS = "full", "int8", "kivi-4bit", "kivi-2bit", "tc-4bit:metric=identity", "tc-2bit:metric=identity"


def one_layer(dtype: torch.dtype) -> Any:
    """A model of one dense layer with the attention of DeepSeek-V3."""
    sizes = {"num_hidden_layers": 1, "first_k_dense_replace": 1, "intermediate_size": 64}
    config = DeepseekV3Config(**sizes, vocab_size=4096, pad_token_id=0)
    torch.manual_seed(0)
    return DeepseekV3ForCausalLM(config).to(dtype).eval()


def fill(cache: Any, model: Any, tokens: int) -> Any:
    """The cache with so many random latents and rotated parts."""
    config, generator = model.config, torch.Generator().manual_seed(1)
    latent, rotated = (
        torch.randn(1, 1, tokens, size, generator=generator).to(model.dtype)
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


def attention_ms(model: Any, cache: KVCache) -> float:
    """How long one new token attends to the latents of a cache, which are decoded for it."""
    latents, config = attach(model).view.compressed[0].latents, model.config
    assert latents is not None
    size = config.qk_nope_head_dim + config.qk_rope_head_dim
    query = torch.randn(1, config.num_attention_heads, 1, size).to(model.dtype)
    begin = time.perf_counter()
    latents.attend(query, cache.latents(0), None, size**-0.5)
    return 1e3 * (time.perf_counter() - begin)


@click.command()
@click.option("--tokens", default=8192, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--spec", "specs", multiple=True, default=SPECS, show_default=True)
@click.option("--dtype", default="float32", show_default=True)
@click.option("--json", "target", help="A results file to write.")
def main(tokens: int, rounds: int, specs: tuple[str, ...], dtype: str, target: str | None) -> None:
    """Time a decoding step of one layer with transformers' cache and with ours."""
    model = one_layer(getattr(torch, dtype))
    samples = torch.randint(4096, (2, 512), generator=torch.Generator().manual_seed(2))
    methods = [parse_method(spec) for spec in specs]
    made: dict[str, Calibration] = {}
    for method in methods:
        if method.needs_calibration and method.calibrated_as not in made:
            made[method.calibrated_as] = calibrate_on(model, samples, method)
    with torch.inference_mode():
        rows = timed(model, methods, made, tokens, rounds)
    if target:
        write_json(target, stamp(rows, dtype=dtype))


def timed(
    model: Any, methods: list[Method], made: dict[str, Calibration], tokens: int, rounds: int
) -> list[dict[str, Any]]:
    known = KVCache(model, "kivi-4bit")
    model(torch.ones(1, 12, dtype=torch.long), past_key_values=known)  # shows what the layer makes of latents
    caches = {"transformers": fill(DynamicCache(config=model.config), model, tokens)}
    for method in methods:
        cache = KVCache(model, method, calibration=made.get(method.calibrated_as))
        caches[method.spec] = fill(cache, model, tokens)
    times: dict[str, list[float]] = {name: [] for name in caches}
    for _ in range(rounds + 1):
        for name, cache in caches.items():
            begin = time.perf_counter()
            model(torch.ones(1, 1, dtype=torch.long), past_key_values=cache)
            times[name].append(1e3 * (time.perf_counter() - begin))
    alone: dict[str, list[float]] = {name: [] for name in caches if name != "transformers"}
    for _ in range(rounds + 1):
        for name, each in alone.items():
            each.append(attention_ms(model, caches[name]))
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
                "attention_ms": statistics.median(alone[name][1:]) if ours else None,
                "cache_bytes": cache.nbytes if ours else own.keys.nbytes + own.values.nbytes,
            }
        )
        print(rows[-1])
    return rows


if __name__ == "__main__":
    main()
