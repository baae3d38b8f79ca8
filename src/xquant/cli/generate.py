"""``xquant generate``: a text written with a compressed cache, and what the cache held."""

import math
import time
from typing import Any

import click

from ..progress import Progress
from ..results.rows import STDOUT
from .common import (
    SPEC,
    calibrations_for,
    calibrations_option,
    finish,
    json_option,
    load,
    model_options,
    own_calibrations,
)
from .progress import progress


@click.command()
@model_options
@click.option(
    "--method", "spec", metavar="SPEC", type=SPEC, default="xquant-4bit", show_default=True
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
    spec: str,
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
    from .. import KVCache, parse_method

    method = parse_method(spec)
    calibrations = calibrations_for([method], artifacts)
    network, tokenizer = load(model, dtype, device)
    calibrations = own_calibrations(network, tokenizer, [method], calibrations)
    inputs = _encode(network, tokenizer, prompt, chat, max_new_tokens)
    cache = KVCache(network, method, calibration=calibrations.of(method))
    with progress(f"writing with {method.spec}") as show:
        started = time.perf_counter()
        new = _continue(network, tokenizer, inputs, cache, max_new_tokens, temperature, seed, show)
        seconds = time.perf_counter() - started
    report = cache.report()
    row = {
        "method": method.spec,
        "prompt": prompt,
        "text": tokenizer.decode(new, skip_special_tokens=True),
        "tokens": len(new),
        "cache_bytes": report.cache_bytes,
        "full_cache_bytes": report.full_cache_bytes,
        "tokens_per_second": len(new) / seconds,
        "report": report.to_dict(),
    }
    finish([row], json_file, model=model, dtype=dtype, device=str(network.device))
    if json_file != STDOUT:
        click.echo(f"{row['text']}\n\n{report}")
        click.echo(f"  speed         {row['tokens_per_second']:.1f} tokens per second")


def _encode(network: Any, tokenizer: Any, prompt: str, chat: bool, room: int) -> Any:
    """Token ids ``[1, T]`` and mask of the prompt; ValueError for none or too many."""
    from ..positions import check_context

    if chat:
        if not tokenizer.chat_template:
            raise ValueError("this model has no chat template: leave out --chat")
        turns = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    else:
        inputs = tokenizer(prompt, return_tensors="pt", verbose=False)
    length = inputs["input_ids"].shape[1]
    if length == 0:
        raise ValueError("the prompt holds no tokens")
    check_context(network, length + room, f"a prompt of {length} tokens and {room} new ones")
    masked = {name: inputs[name] for name in ("input_ids", "attention_mask") if name in inputs}
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

    torch.manual_seed(seed)
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    how = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    output = network.generate(
        **inputs,
        **how,
        past_key_values=cache,
        max_new_tokens=room,
        pad_token_id=pad,
        streamer=Counter(lambda count: show(count, room, f"up to {room} tokens")),
    )
    return output[0, inputs["input_ids"].shape[1] :]
