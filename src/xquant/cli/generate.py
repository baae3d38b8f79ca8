"""``xquant generate``: a text written with a compressed cache, and what the cache held."""

import math
import time
from pathlib import Path
from typing import Any

import click

from ..catalogue import USUAL
from ..progress import Progress
from ..results import STDOUT
from ..saved.header import Saved, read_header
from .common import (
    SPEC,
    Checked,
    calibrations_for,
    calibrations_option,
    finish,
    json_option,
    load,
    model_options,
    own_calibrations,
)
from .progress import progress
from .tables import say

SAVED = Checked("file", lambda name: read_header(Path(name)))


@click.command()
@model_options
@click.option(
    "--method",
    "spec",
    metavar="SPEC",
    type=SPEC,
    help=f"[default: {USUAL}, or that of the prompt's cache]",
)
@click.option(
    "--prompt-cache",
    "saved_file",
    metavar="FILE",
    type=SAVED,
    help="Go on from what 'xquant prompt' has read; --prompt is what follows.",
)
@click.option("--prompt", metavar="TEXT", required=True)
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of sampling.")
@click.option("--chat", is_flag=True, help="Put the prompt in the model's chat template.")
@calibrations_option
@json_option
def generate(
    model: str,
    dtype: str,
    device: str | None,
    spec: str | None,
    saved_file: str | None,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    chat: bool,
    artifacts: tuple[str, ...],
    json_file: str | None,
) -> None:
    """Continue a prompt with MODEL (a folder, a hub id, smollm2 or smollm2-mha).

    Tokens per second are the new tokens over the whole call, reading the prompt included.
    """
    if not prompt:
        raise ValueError("the prompt is empty")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"a temperature of {temperature} is not a number from 0 up")
    saved = None if saved_file is None else _saved(saved_file, dtype, chat)
    from .. import KVCache, parse_method

    methods = [parse_method(spec or (saved.header.method if saved else USUAL))]
    if saved is not None and parse_method(saved.header.method) != methods[0]:
        methods.append(parse_method(saved.header.method))
    method = methods[0]
    calibrations = calibrations_for(methods, artifacts)
    network, tokenizer = load(model, dtype, device)
    if saved is None or len(methods) > 1:  # what a saved cache was made with is not made anew
        calibrations = own_calibrations(network, tokenizer, [method], calibrations)
    if saved is None:
        inputs = encode(network, tokenizer, prompt, max_new_tokens, chat)
        cache = KVCache(network, method, calibration=calibrations.of(method))
    else:
        cache = KVCache.load(network, saved.path, calibrations.of(methods[-1]))
        inputs = encode(network, tokenizer, prompt, max_new_tokens, before=cache.saved_tokens)
        cache = cache.converted(method, calibrations.of(method))
    with progress(f"writing with {method.spec}") as show:
        started = time.perf_counter()
        new = _continue(network, tokenizer, inputs, cache, max_new_tokens, temperature, seed, show)
        seconds = time.perf_counter() - started
    report = cache.report()
    row = {
        "method": method.spec,
        "prompt": prompt,
        "prompt_cache": saved_file,
        "text": tokenizer.decode(new, skip_special_tokens=True),
        "tokens": len(new),
        "cache_bytes": report.cache_bytes,
        "full_cache_bytes": report.full_cache_bytes,
        "tokens_per_second": len(new) / seconds,
        "report": report.to_dict(),
    }
    finish([row], json_file, model=model, dtype=dtype, device=str(network.device))
    if json_file != STDOUT:
        click.echo(f"{row['text']}\n")
        say(f"{report}\n  speed         {row['tokens_per_second']:.1f} tokens per second")


def _saved(file: str, dtype: str, chat: bool) -> Saved:
    """The saved cache of one prompt, to go on from in ``dtype``; ValueError where that cannot be."""
    saved = read_header(Path(file))
    header = saved.header
    if chat:
        raise ValueError("--chat writes a turn from its start: it cannot go on from --prompt-cache")
    if header.batch != 1 or "tokens" not in saved.sizes:
        what = "their ids" if "tokens" in saved.sizes else "no ids of tokens"
        raise ValueError(
            f"'{file}' holds {header.batch} sequences and {what}: 'xquant prompt' saves one prompt with"
            " its ids"
        )
    if header.dtype != dtype:
        raise ValueError(
            f"'{file}' was saved from a model in {header.dtype[:20]}: give --dtype {header.dtype[:20]}"
        )
    return saved


def encode(
    network: Any, tokenizer: Any, prompt: str, room: int, chat: bool = False, before: Any = None
) -> Any:
    """Token ids ``[1, T]`` and mask of the prompt, after the tokens ``before`` it; ValueError for none or too
    many."""
    import torch

    from ..positions import check_context

    if chat:
        if not tokenizer.chat_template:
            raise ValueError("this model has no chat template: leave out --chat")
        turns = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    else:
        first = before is None
        inputs = tokenizer(prompt, return_tensors="pt", verbose=False, add_special_tokens=first)
    length = inputs["input_ids"].shape[1]
    if length == 0:
        raise ValueError("the prompt holds no tokens")
    masked = {name: inputs[name] for name in ("input_ids", "attention_mask") if name in inputs}
    if before is not None:
        if int(before.max()) >= network.get_input_embeddings().num_embeddings:
            raise ValueError("the saved cache is of tokens that this model does not know")
        ids = torch.cat([before, inputs["input_ids"]], 1)
        masked = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        length = ids.shape[1]
    check_context(network, length + room, f"a prompt of {length} tokens and {room} new ones")
    return {name: tensor.to(network.device) for name, tensor in masked.items()}


def _continue(
    network: Any,
    tokenizer: Any,
    inputs: Any,
    cache: Any,
    room: int,
    temperature: float,
    seed: int,
    show: Progress,
) -> Any:
    """New token ids ``[N]`` of a completion of at most ``room`` tokens."""
    import torch

    from ..calibrators.writing import Counter
    from ..compat import CACHE

    torch.manual_seed(seed)
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    how = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    output = network.generate(
        **inputs,
        **how,
        **{CACHE: cache},
        max_new_tokens=room,
        pad_token_id=pad,
        streamer=Counter(lambda count: show(count, room, f"up to {room} tokens")),
    )
    return output[0, inputs["input_ids"].shape[1] :]
