"""`KVCache`: the bytes of a saved cache, what it reads, and what it scores in store mode."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import xquant
from support.caches import make_cache
from support.method_matrix import IDENTITY, LOW
from support.models import FAMILIES, left_padded, tiny
from xquant import KVCache, load_model, parse_method
from xquant.text import read_text

from .common import WIDE, Case, Digest, Found, generated

SMOLLM2 = (
    *("full", "int4-gs64", "nf4-gs128", "kivi-2bit", "kivi-4bit:rope=post", "asymkv-1.5bit"),
    *("crosslayer", "kvquant-3bit-1%", "xquant-2bit", "xquant-4bit", "xquant-cl-3bit"),
    *("tc-2bit", "tc-cl-2bit"),
)
KERNELS = ("auto", "avx2", "folded", "reference", "triton")
IDENTICAL = ("llama", "gemma3")
"""Families for 16 bits, where all methods do the same."""
TRITON = ("qwen2",)
"""Families that Triton's interpreter, which is slow, attends for."""
MakeCache = Callable[..., KVCache]


def saved(cache: KVCache) -> str:
    """Of the file that the cache is saved to, which has all that its layers hold."""
    digest = Digest()
    with TemporaryDirectory() as folder:
        file = Path(folder) / "x.cache"
        cache.save(file)
        digest.add_file(file)
    return digest.hex()


@torch.no_grad()
def scored(model: Any, cache: KVCache, ids: torch.Tensor) -> str:
    """Of the log-likelihoods of a text, every token of which reads the store."""
    digest = Digest()
    logits = model(ids, past_key_values=cache).logits
    digest.add("loss", torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:]))
    return digest.hex()


def digests_of(model: Any, spec: str, kernel: str, make: MakeCache, inputs: Mapping[str, Any]) -> Found:
    """What a method computes on a model."""
    found: Found = {}
    try:
        cache = make(model, spec, "chunk", kernel)
        found["generated"] = generated(model, cache, inputs)
        found["saved"] = saved(cache)
        if parse_method(spec).causal and kernel == "auto":
            ids = inputs["input_ids"][-1:]
            found["scored"] = scored(model, make(model, spec, "store", "auto"), ids)
    except ValueError as error:
        found["refused"] = str(error)
    return found


def tiny_cases() -> Iterator[Case]:
    inputs, longer = left_padded([40, 33]), left_padded([100, 93])

    for family in FAMILIES:
        model = tiny(family)
        for spec in (*(IDENTITY if family in IDENTICAL else ()), *LOW):
            yield f"{family} {spec}", partial(digests_of, model, spec, "auto", make_cache, inputs)
    for family in FAMILIES:
        # Weights that do not blow up what rounding leaves.
        model = tiny(family, head_dim=32, hidden_size=64, initializer_range=0.05)
        for spec, kernel in product(WIDE, KERNELS):
            if kernel != "triton" or family in TRITON:
                find = partial(digests_of, model, spec, kernel, make_cache, longer)
                yield f"wide {family} {spec} {kernel}", find


def smollm2_cases() -> Iterator[Case]:
    model, tokenizer = load_model("smollm2")
    text = read_text("help-topics")
    ids = torch.tensor(tokenizer(text)["input_ids"][10000:10700])[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    made: dict[str, Any] = {}

    def make(model: Any, spec: str, attend: str, kernel: str) -> KVCache:
        method = parse_method(spec)
        kind = method.calibrated_as
        if method.needs_calibration and kind not in made:
            made[kind] = xquant.calibrate(model, tokenizer, method, text, 256, 8)
        return KVCache(model, method, attend, made.get(kind), kernel)

    for spec, kernel in product(SMOLLM2, ("auto", "reference")):
        yield f"smollm2 {spec} {kernel}", partial(digests_of, model, spec, kernel, make, inputs)
