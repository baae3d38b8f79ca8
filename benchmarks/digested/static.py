"""`StaticKVCache`: what it reads, by every kernel, and the keys and values that its layers show."""

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

from support.caches import calibration
from support.models import left_padded, tiny
from xquant import StaticKVCache

from .common import WIDE, Case, Digest, Found, generated

FAMILIES = ("llama", "qwen2", "phi3")
KERNELS = ("auto", "avx2", "reference", "triton")
SPECS = (*WIDE, "int4:group=32", "nf4:group=32", "tc-2bit:group=32,basis=keys-first")
ROOM = 160


def digests_of(model: Any, spec: str, kernel: str, inputs: Mapping[str, Any]) -> Found:
    """What a method computes on a model; the prompt ends within a block, and a block is sealed after it."""
    found: Found = {}
    try:
        cache = StaticKVCache(model, spec, ROOM, calibration=calibration(model, spec), kernel=kernel)
        found["generated"] = generated(model, cache, inputs, 40)
        shown = Digest()
        for layer in cache.layers:
            shown.add("keys", layer.keys)
            shown.add("values", layer.values)
        found["shown"] = shown.hex()
    except ValueError as error:
        found["refused"] = str(error)
    return found


def cases() -> Iterator[Case]:
    inputs = left_padded([96, 64])
    for family in FAMILIES:
        model = tiny(family, head_dim=32, hidden_size=64, initializer_range=0.05)
        for spec, kernel in product(SPECS, KERNELS):
            if kernel != "triton" or family == "qwen2":
                name = f"static {family} {spec} {kernel}"
                yield name, partial(digests_of, model, spec, kernel, inputs)
