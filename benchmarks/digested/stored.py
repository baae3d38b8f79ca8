"""`PrefixStore`: the files of a folder, and what a cache of a stored prefix reads; and caches converted."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from support.caches import calibration, make_cache
from support.models import prompt, tiny
from xquant import KVCache, PrefixStore

from .common import WIDE, Case, Digest, Found, generated
from .growing import saved

FAMILIES = ("llama", "qwen2")
SPECS = (*WIDE, "tc-cl-2bit:group=32,span=2")
LENGTH = 290


@torch.no_grad()
def stored(model: Any, spec: str) -> Found:
    """Of a prompt, and of one that begins as it does."""
    ids = prompt(1, LENGTH)
    found: Found = {}
    try:
        cache = make_cache(model, spec)
        model(ids, past_key_values=cache)
        with TemporaryDirectory() as folder:
            store = PrefixStore(folder, model, spec, calibration=calibration(model, spec))
            store.put(cache, ids)
            files = Digest()
            for file in sorted(each for each in Path(folder).rglob("*") if each.is_file()):
                if not file.name.startswith("."):
                    files.add_file(file)
            found["files"] = files.hex()
            known = store.get(ids)
            assert known is not None
            rest = ids[:, known.get_seq_length() :]
            read = Digest()
            read.add("logits", model(rest, past_key_values=known).logits)
            found["read"] = read.hex()
    except ValueError as error:
        found["refused"] = str(error)
    return found


@torch.no_grad()
def converted(model: Any, spec: str) -> Found:
    """Of a full cache that is compressed, and goes on."""
    ids = prompt(2, 100)
    found: Found = {}
    try:
        full = KVCache(model, "full:group=32")
        model(ids, past_key_values=full)
        cache = full.converted(spec, calibration(model, spec))
        found["converted"] = saved(cache)
        inputs = {"input_ids": ids[:, -1:], "attention_mask": torch.ones(2, 101, dtype=torch.long)}
        found["generated"] = generated(model, cache, inputs, 5)
    except ValueError as error:
        found["refused"] = str(error)
    return found


def cases() -> Iterator[Case]:
    for family in FAMILIES:
        model = tiny(family, head_dim=32, hidden_size=64, initializer_range=0.05)
        for spec in SPECS:
            yield f"stored {family} {spec}", partial(stored, model, spec)
            yield f"converted {family} {spec}", partial(converted, model, spec)
