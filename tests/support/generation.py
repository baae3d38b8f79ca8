"""Every way people generate, as functions of a model and a cache: each returns tokens ``[B, T]``.

``make`` gives a fresh cache, ours or transformers' own, so that one function serves both.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from support.models import left_padded, prompt

Make = Callable[[], Any]
Operation = Callable[[Any, Make], Tensor]
NEW = 12


def generate(model: Any, cache: Any, ids: Tensor, **options: Any) -> Tensor:
    # The mask is given: left to guess, generate takes a generated pad token for padding.
    options = {"attention_mask": torch.ones_like(ids), **options}
    options = {"max_new_tokens": NEW, "do_sample": False, **options}
    return model.generate(ids, past_key_values=cache, **options)


def greedy(model: Any, make: Make) -> Tensor:
    return generate(model, make(), prompt())


def sampling(model: Any, make: Make) -> Tensor:
    torch.manual_seed(7)
    return generate(model, make(), prompt(), do_sample=True, temperature=0.7)


def beams(model: Any, make: Make) -> Tensor:
    return generate(model, make(), prompt(2), num_beams=3)


def several_sequences(model: Any, make: Make) -> Tensor:
    torch.manual_seed(7)
    return generate(model, make(), prompt(), do_sample=True, num_return_sequences=3)


def padded(model: Any, make: Make) -> Tensor:
    batch = left_padded([33, 9, 20])
    ids = batch.pop("input_ids")
    return generate(model, make(), ids, **batch)


def chunked_prefill(model: Any, make: Make) -> Tensor:
    cache, ids = make(), prompt(2, 41)
    for chunk in ids[:, :-1].split(7, 1):
        model(chunk, past_key_values=cache, use_cache=True)
    return generate(model, cache, ids)


def second_turn(model: Any, make: Make) -> Tensor:
    cache = make()
    first = generate(model, cache, prompt())
    return generate(model, cache, torch.cat([first, prompt(1, 13, seed=2)], 1))


def crop_and_continue(model: Any, make: Make) -> Tensor:
    cache, ids = make(), prompt()
    model(ids, past_key_values=cache, use_cache=True)
    remove(cache, 13)
    return generate(model, cache, torch.cat([ids[:, :27], prompt(1, 20, seed=3)], 1))


def prompt_lookup(model: Any, make: Make) -> Tensor:
    ids = prompt(1, 10).repeat(1, 4)
    return generate(model, make(), ids, prompt_lookup_num_tokens=3)


def assisted(model: Any, make: Make) -> Tensor:
    return generate(model, make(), prompt(), assistant_model=model)


def select(model: Any, make: Make) -> Tensor:
    cache, ids = make(), prompt(3)
    model(ids[:, :-1], past_key_values=cache, use_cache=True)
    keep = torch.tensor([2, 0])
    cache.batch_select_indices(keep)
    return generate(model, cache, ids[keep])


def repeat(model: Any, make: Make) -> Tensor:
    cache, ids = make(), prompt(2)
    model(ids[:, :-1], past_key_values=cache, use_cache=True)
    cache.batch_repeat_interleave(2)
    ids = torch.cat([ids.repeat_interleave(2, 0), prompt(4, 3, seed=5)], 1)
    model(ids[:, 39:42], past_key_values=cache, use_cache=True)
    return generate(model, cache, ids)


def reset(model: Any, make: Make) -> Tensor:
    cache = make()
    generate(model, cache, prompt(2, 30, seed=4))
    cache.reset()
    return generate(model, cache, prompt())


def copied(model: Any, make: Make) -> Tensor:
    prefix, ids = make(), prompt()
    model(ids[:, :30], past_key_values=prefix, use_cache=True)
    generate(model, copy.deepcopy(prefix), torch.cat([ids[:, :30], prompt(1, 9, seed=6)], 1))
    return generate(model, prefix, ids)


def prefill_by_generate(model: Any, make: Make) -> Tensor:
    return generate(model, make(), prompt(2, 41), prefill_chunk_size=7)


def remove(cache: Any, count: int) -> None:
    """Crop by ``count`` tokens in the way that every supported transformers understands."""
    if hasattr(cache, "activate_past_recording") and any(cache.is_sliding):
        cache.activate_past_recording()
    cache.crop(-count)


OPERATIONS: list[Operation] = [
    greedy, sampling, beams, several_sequences, padded, chunked_prefill, second_turn,
    crop_and_continue, prompt_lookup, assisted, select, repeat, reset,
    copied, prefill_by_generate,
]  # fmt: skip
