"""Rivals, our own methods and transformers' caches as they are used: prompts in passes, then token by token.

    python benchmarks/used.py --wikitext FILE --c4 FILE --json results.json

The full cache continues 20 prompts greedily, and an end of a text does not end them. Each other cache then
reads the same prompts in passes of 64 tokens, which attend to each other exactly, and the full cache's
continuation one token at a time. What it predicts before each of these tokens is compared with what the full
cache predicts there: the divergence, and whether the most likely token is the same.

That also says how long the method's own greedy text is the full cache's, without another run. As long as its
most likely token is the one that the full cache went on with, it would have been fed the same token. So the
first place where they differ is the number of tokens until the first other one.

Half of the prompts are of C4, a quarter of WikiText-2, a quarter of Python source, from places spread evenly
over each text. All have one length, so they are one batch, without padding.

transformers' `QuantizedCache` has its defaults, 128 recent tokens in full among them. With hqq its axis is 1,
as hqq's guide advises: its groups are then 64 channels of one token, as quanto's are. Scales have the dtype
of the model, here fp32.

``bits_per_value`` is that of codes, ranges and sinks at the end. ``cache_ratio`` is of all that is held, with
the tokens in full, over the fp16 cache: the mean over the steps.
"""

import importlib.metadata
import re
import time
from collections.abc import Callable
from statistics import fmean, median
from typing import Any, NamedTuple

import click
import torch
from rivals import METHODS, SOURCES, source
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, QuantizedCache
from transformers.utils import is_hqq_available, is_optimum_quanto_available

from xquant import KVCache, load_model, own_calibration, parse_method
from xquant.bench.contenders import head_sizes
from xquant.bench.peers import held_bytes
from xquant.results.rows import stamp, write_json
from xquant.runs import Runs, identity
from xquant.text import cut_windows, read_text

OWN = *METHODS, "tc-cl-1bit:tail=128"
BACKENDS = {"quanto": is_optimum_quanto_available, "hqq": is_hqq_available}
PACKAGES = {"quanto": "optimum-quanto", "hqq": "hqq"}
PEER = re.compile(r"QuantizedCache-(\w+)-(\d)bit")
PASS = 64
"""Tokens of a prompt that are read at a time."""
FIRST = 64
"""Steps in the first range of positions."""


class Sizes(NamedTuple):
    """Of a cache as it is now."""

    bits_per_value: float
    cache_ratio: float


class Reference(NamedTuple):
    """What the full cache does after the prompts."""

    tokens: Tensor  # [B, N], its greedy continuation
    predicted: Tensor  # [B, N, V], log-probabilities before each of them


@click.command()
@click.option("--wikitext", required=True, help="The test text of WikiText-2.")
@click.option("--c4", required=True, help="Passages of C4, a .jsonl file.")
@click.option("--context", default=512, show_default=True, help="Tokens of a prompt.")
@click.option("--tokens", default=512, show_default=True, help="Tokens after it.")
@click.option("--prompts", "count", default=20, show_default=True)
@click.option("--method", "specs", multiple=True, help="By default all that are installed.")
@click.option("--resume", help="A folder that keeps what is finished.")
@click.option("--json", "target", required=True)
def main(
    wikitext: str,
    c4: str,
    context: int,
    tokens: int,
    count: int,
    specs: tuple[str, ...],
    resume: str | None,
    target: str,
) -> None:
    model, tokenizer = load_model("smollm2")
    texts = {"C4": read_text(c4), "WikiText-2": read_text(wikitext), "Python source": source()}
    shares = {"C4": count - count // 4 * 2, "WikiText-2": count // 4, "Python source": count // 4}
    cut = [spread(model, tokenizer, texts[name], context, n) for name, n in shares.items() if n]
    prompts = torch.cat(cut)
    subject = {"tokens": tokens, "pass": PASS, **identity(model, str(prompts.tolist()), [])}
    runs, reference = Runs(resume, subject), None
    rows: list[dict[str, Any]] = []
    for spec in specs or (*OWN, *peers()):
        make, name = maker(model, tokenizer, spec)
        held = runs.load(name)
        if held is None:
            if reference is None:
                reference = continued(model, prompts, tokens)
                click.echo("the full cache's continuation is there")
            held = [{"method": spec, **measured(model, prompts, reference, make)}]
            runs.save(name, held)
        rows += held
        click.echo(
            "{method:26} KL {kl:.4f}, same for {median_first_difference} tokens".format(**held[0])
        )
    versions = {name: importlib.metadata.version(name) for name in SOURCES}
    packages = {PACKAGES[found[1]] for row in rows if (found := PEER.fullmatch(row["method"]))}
    where = {name: importlib.metadata.version(name) for name in sorted(packages)}
    of = {"model": "smollm2", "dtype": "float32", "prompts": shares, "context": context}
    write_json(target, stamp(rows, **of, tokens=tokens, source_of=versions, packages=where))


def peers() -> list[str]:
    """transformers' own caches whose packages are installed."""
    return [
        f"QuantizedCache-{backend}-{bits}bit"
        for backend, installed in BACKENDS.items()
        for bits in (4, 2)
        if installed()
    ]


def spread(model: Any, tokenizer: Any, text: str, context: int, count: int) -> Tensor:
    """``[count, context]`` tokens from places spread evenly over a text."""
    whole = len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) // context
    windows = cut_windows(model, tokenizer, text, context, whole)
    return windows[[i * whole // count for i in range(count)]]


def maker(model: Any, tokenizer: Any, spec: str) -> tuple[Callable[[], Any], str]:
    """What makes an empty cache, and a name for it and all that it depends on."""
    if found := PEER.fullmatch(spec):
        backend, bits = found[1], int(found[2])
        version = importlib.metadata.version(PACKAGES[backend])
        return (lambda: quantized(model, backend, bits)), f"{spec} {version}"
    method = parse_method(spec)
    if not method.needs_calibration:
        return (lambda: KVCache(model, method)), spec
    made = own_calibration(model, tokenizer, method)
    return (lambda: KVCache(model, method, calibration=made)), f"{spec} {made.digest}"


def quantized(model: Any, backend: str, bits: int) -> QuantizedCache:
    """transformers' cache, with the axis of the groups that its backend advises."""
    axis = {"quanto": 0, "hqq": 1}[backend]
    return QuantizedCache(backend, model.config, nbits=bits, axis_key=axis, axis_value=axis)


@torch.inference_mode()
def read(model: Any, cache: Any, prompts: Tensor) -> Tensor:
    """Logits ``[B, V]`` after the prompts, which ``cache`` reads in passes."""
    for part in prompts.split(PASS, 1):
        logits = model(part, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    return logits[:, -1].float()


@torch.inference_mode()
def step(model: Any, cache: Any, token: Tensor) -> Tensor:
    """Logits ``[B, V]`` after one more token ``[B]``."""
    logits: Tensor = model(token[:, None], past_key_values=cache, use_cache=True).logits
    return logits[:, -1].float()


@torch.inference_mode()
def continued(model: Any, prompts: Tensor, tokens: int, cache: Any = None) -> Reference:
    """The greedy continuation with an empty cache, by default transformers' full one."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    logits = read(model, cache, prompts)
    found = prompts.new_empty(len(prompts), tokens)
    predicted = logits.new_empty(len(prompts), tokens, logits.shape[-1])
    for i in range(tokens):
        predicted[:, i], found[:, i] = logits.log_softmax(-1), logits.argmax(-1)
        if i + 1 < tokens:
            logits = step(model, cache, found[:, i])
    return Reference(found, predicted)


@torch.inference_mode()
def measured(
    model: Any, prompts: Tensor, reference: Reference, make: Callable[[], Any]
) -> dict[str, Any]:
    """A cache of ``make`` along the full cache's continuation."""
    started, cache = time.perf_counter(), make()
    tokens = reference.tokens.shape[1]
    chosen, kl, ratios = torch.empty_like(reference.tokens), torch.empty(tokens), []
    logits = read(model, cache, prompts)
    for i in range(tokens):
        ratios.append(sizes(model, cache, len(prompts)).cache_ratio)
        own, wanted = logits.log_softmax(-1), reference.predicted[:, i]
        kl[i] = F.kl_div(own, wanted, reduction="batchmean", log_target=True)
        chosen[:, i] = logits.argmax(-1)
        if i + 1 < tokens:
            logits = step(model, cache, reference.tokens[:, i])
    same = first_differences(chosen, reference.tokens)
    return {
        # Rounding can leave a divergence of next to nothing below zero.
        "kl": max(kl.mean().item(), 0.0),
        "kl_by_position": {
            name: max(kl[where].mean().item(), 0.0) for name, where in ranges(tokens).items()
        },
        "same_token": (chosen == reference.tokens).float().mean().item(),
        "first_difference": same,
        "median_first_difference": median(same),
        "mean_first_difference": fmean(same),
        "never_differs": same.count(tokens),
        "bits_per_value": sizes(model, cache, len(prompts)).bits_per_value,
        "cache_ratio": fmean(ratios),
        "seconds": time.perf_counter() - started,
    }


def ranges(tokens: int) -> dict[str, slice]:
    """Positions 0-63, 64-127, 128-255 and so on: each range is as long as all before it."""
    found, start = {}, 0
    while start < tokens:
        end = min(max(2 * start, FIRST), tokens)
        found[f"{start}-{end - 1}"] = slice(start, end)
        start = end
    return found


def first_differences(chosen: Tensor, wanted: Tensor) -> list[int]:
    """Of each row of ``[B, N]`` the tokens before the first that differs, ``N`` where none does."""
    return (chosen == wanted).long().cumprod(1).sum(1).tolist()


def sizes(model: Any, cache: Any, batch: int) -> Sizes:
    if isinstance(cache, KVCache):
        report = cache.report()
        return Sizes(report.bits_per_value, report.cache_ratio)
    _, heads, size = head_sizes(model)
    of_token = 2 * heads * size * batch
    codes = every = coded = values = 0
    for layer in cache.layers:
        recent = layer.keys.shape[2] if layer.keys.dim() == 4 else 0
        values += of_token * layer.get_seq_length()
        coded += of_token * (layer.get_seq_length() - recent)
        codes += held_bytes([layer._quantized_keys, layer._quantized_values])
        every += held_bytes(layer.__dict__)
    return Sizes(8 * codes / coded, every / (2 * values))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
