"""``xquant prompt``: a long prompt read once, and its cache kept in a file."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..catalogue import USUAL
from ..progress import Progress
from ..results import STDOUT
from ..sizes import readable
from .common import (
    OUT_FILE,
    SPEC,
    calibrations_for,
    calibrations_option,
    finish,
    json_option,
    load,
    model_options,
    own_calibrations,
)
from .generate import encode
from .progress import progress
from .tables import say

if TYPE_CHECKING:
    import torch

    from .. import KVCache

CHUNK = 512
"""Tokens of a forward pass: what a layer holds of them in full is packed before the next."""


@click.command()
@model_options
@click.option("--method", "spec", metavar="SPEC", type=SPEC, default=USUAL, show_default=True)
@click.option("--text", metavar="FILE", help="Text file, or a name as of 'xquant perplexity'; read whole.")
@click.option("--prompt", "words", metavar="TEXT", help="The prompt itself, in place of --text.")
@click.option("--output", metavar="FILE", type=OUT_FILE, required=True, help="The saved cache.")
@click.option("--pack", type=click.Choice(["entropy"]), help="Make the file smaller, without loss.")
@calibrations_option
@json_option
def prompt(
    model: str,
    dtype: str,
    device: str | None,
    spec: str,
    text: str | None,
    words: str | None,
    output: str,
    pack: str | None,
    artifacts: tuple[str, ...],
    json_file: str | None,
) -> None:
    """Read a prompt with MODEL once, and save its compressed cache.

    'xquant generate MODEL --prompt-cache FILE' goes on from it, and 'xquant inspect FILE' says what it holds.
    """
    if output == STDOUT:
        raise ValueError("the cache is saved to a file, not to standard output")
    if (text is None) == (words is None):
        raise ValueError("give either --text FILE or --prompt TEXT")
    from ..text import read_text

    read = read_text(text) if text is not None else str(words)
    if not read:
        raise ValueError("the prompt is empty")
    from .. import KVCache, parse_method

    method = parse_method(spec)
    calibrations = calibrations_for([method], artifacts)
    network, tokenizer = load(model, dtype, device)
    calibrations = own_calibrations(network, tokenizer, [method], calibrations)
    ids = encode(network, tokenizer, read, 0)["input_ids"]
    cache = KVCache(network, method, calibration=calibrations.of(method))
    started = time.perf_counter()
    with progress(f"reading with {method.spec}") as show:
        fill(cache, ids, show)
    seconds = time.perf_counter() - started
    cache.save(output, ids, pack)
    report, size = cache.report(), Path(output).stat().st_size
    row = {
        "method": method.spec,
        "output": output,
        "tokens": report.tokens,
        "cache_bytes": report.cache_bytes,
        "full_cache_bytes": report.full_cache_bytes,
        "file_bytes": size,
        "seconds": seconds,
        "report": report.to_dict(),
    }
    finish([row], json_file, model=model, dtype=dtype, device=str(network.device))
    if json_file != STDOUT:
        say(
            f"{output}: {readable(size)}, {report.tokens} tokens with {method.spec}, read in"
            f" {seconds:.1f} s\n{report}"
        )


def fill(cache: "KVCache", ids: "torch.Tensor", show: Progress) -> None:
    """Read token ids ``[1, T]`` into an empty cache, a chunk at a time."""
    import torch

    from ..compat import CACHE

    done, total = 0, ids.shape[1]
    with torch.inference_mode():
        for part in ids.split(CHUNK, 1):
            cache.attachment.view.decoder(part, **{CACHE: cache}, use_cache=True)
            done += part.shape[1]
            show(done, total, f"{total} tokens")
