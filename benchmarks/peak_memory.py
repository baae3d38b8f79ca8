"""Peak resident memory of a long prefill and some decoding, each cache in a process of its own.

python benchmarks/peak_memory.py --prefill 6000 --decode 32 --json results.json
"""

import resource
import subprocess
import sys

import click
import torch
from transformers import DynamicCache

from xquant import KVCache, load_model
from xquant.results import stamp, write_json


@click.command()
@click.option("--prefill", default=6000, show_default=True)
@click.option("--decode", default=32, show_default=True)
@click.option("--method", "specs", multiple=True, default=["xquant-4bit"], show_default=True)
@click.option("--json", "target")
@click.option("--one", hidden=True)
def main(prefill: int, decode: int, specs: tuple[str, ...], target: str | None, one: str | None) -> None:
    if one is not None:
        click.echo(_peak(one, prefill, decode))
        return
    if target is None:
        raise click.UsageError("--json FILE is needed")
    rows = []
    for name in ("DynamicCache", *specs):
        command = [sys.executable, __file__, "--one", name]
        command += ["--prefill", str(prefill), "--decode", str(decode)]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append({"method": name, "prefill": prefill, "decode": decode, "peak_mb": float(run.stdout)})
        click.echo(f"{name:32} {rows[-1]['peak_mb']:8.0f} MB")
    write_json(target, stamp(rows, model="smollm2", dtype="float32"))


@torch.inference_mode()
def _peak(name: str, prefill: int, decode: int) -> float:
    """Peak resident set in MB, the model included."""
    model, _ = load_model("smollm2")
    ids = torch.randint(model.config.vocab_size, (1, prefill), generator=torch.Generator().manual_seed(0))
    cache = DynamicCache(config=model.config) if name == "DynamicCache" else KVCache(model, name)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=decode,
        min_new_tokens=decode,
        do_sample=False,
    )
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
