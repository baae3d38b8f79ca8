"""The operations matrix: methods x families x every way people generate."""

import os
from functools import cache as memoize
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from support.block_sizes import block_nbytes
from support.caches import make_cache
from support.generation import OPERATIONS, Operation, greedy, reset
from support.method_matrix import IDENTITY, LOW, RIVALS
from support.models import FAMILIES, OTHERS, tiny
from support.unusual_models import with_images
from xquant import KVCache, compat
from xquant.quant.quantizer import OUTLIER_NBYTES

MORE = [s for s in IDENTITY if not s.startswith("x")] if os.environ.get("XQUANT_MATRIX") else []
"""`make matrix` runs all."""
ALIKE = ("llama-mha", "mistral", "qwen3", "gemma2")
"""Families whose attention is much like another's: `make matrix` crosses them with everything, and
tests/forms/test_stateful.py draws sequences of operations for them too."""
FROM_X = ("cohere2", "glm4", "gpt2", "olmo3", "qwen3_next")
WINDOWED = ("gemma2", "gemma3", "cohere2", "gpt_oss", "olmo3", "gemma4")
CHANGING = ("crop_and_continue", "assisted", "prompt_lookup", "select", "repeat")
RECURRENT = ("qwen3_next", "qwen3_5", "granitemoehybrid", "falcon_h1")


def family_model(family: str) -> Any:
    if family == "qwen2_5_vl":  # it keeps what it saw of a batch for the next
        return with_images("Qwen2_5_VL")
    return _kept_model(family)


@memoize
def _kept_model(family: str) -> Any:
    with torch.inference_mode(False):  # a model made within it could not be calibrated
        return tiny(family)


@memoize
def expected(family: str, operation: Operation) -> torch.Tensor:
    model = family_model(family)
    if operation is reset:  # a cache that was reset is a new cache
        operation = greedy
    with torch.inference_mode():
        return operation(model, lambda: DynamicCache(config=model.config))


def skip_what_transformers_cannot(family: str, operation: Operation) -> None:
    rolls_back = ["crop_and_continue"]
    if compat.CROP_ZERO_EMPTIES:
        rolls_back += ["assisted", "prompt_lookup"]
    if family in WINDOWED and operation.__name__ in rolls_back:
        pytest.skip("transformers cannot crop a sliding window that has passed")
    if family in RECURRENT and operation.__name__ in CHANGING:
        pytest.skip("a recurrent state cannot go back, nor have its sequences chosen")


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: o.__name__)
@pytest.mark.parametrize("spec", IDENTITY)
@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=pytest.mark.long if family in ALIKE else ()) for family in FAMILIES],
)
@pytest.mark.cases(40)
@torch.inference_mode()
def test_identity_codec_gives_the_same_tokens(family: str, spec: str, operation: Operation) -> None:
    skip_what_transformers_cannot(family, operation)
    want = expected(family, operation)
    model = family_model(family)
    got = operation(model, lambda: make_cache(model, spec))
    assert torch.equal(got, want)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: o.__name__)
@pytest.mark.parametrize(
    ("family", "spec"),
    [
        *((family, "kivi-16bit:group=8,sink=2") for family in (*OTHERS, "qwen2_5_vl")),
        *((family, "xquant-16bit:group=8,form=gqa") for family in FROM_X),
        *((family, spec) for family in (*OTHERS, "qwen2_5_vl") for spec in MORE),
    ],
)
@pytest.mark.cases(30)
@torch.inference_mode()
def test_other_families_too(family: str, spec: str, operation: Operation) -> None:
    skip_what_transformers_cannot(family, operation)
    model = family_model(family)
    got = operation(model, lambda: make_cache(model, spec))
    assert torch.equal(got, expected(family, operation))


def outcome(family: str, spec: str, operation: Operation) -> tuple[torch.Tensor, KVCache]:
    """The tokens of an operation, as many as with transformers' cache, and the last cache that it used."""
    skip_what_transformers_cannot(family, operation)
    model = family_model(family)
    caches: list[KVCache] = []

    def make() -> KVCache:
        caches.append(make_cache(model, spec))
        return caches[-1]

    tokens = operation(model, make)
    assert tokens.shape == expected(family, operation).shape
    return tokens, caches[-1]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: o.__name__)
@pytest.mark.parametrize("spec", [*LOW, *(RIVALS if MORE else ())])
@pytest.mark.parametrize(
    "family",
    [
        "llama",
        *(pytest.param(each, marks=pytest.mark.long) for each in ("gemma3", *FROM_X)),
    ],
)
@pytest.mark.cases(30)
@torch.inference_mode()
def test_low_bits_run_with_lengths_and_positions_right(family: str, spec: str, operation: Operation) -> None:
    tokens, cache = outcome(family, spec, operation)
    length = tokens.shape[1] - 1
    assert cache.get_seq_length() in (length, length + 1)  # assisted decoding may end past its last
    assert {layer.get_seq_length() for layer in cache.compressed} == {cache.index.length}
    real = cache.index.real
    ranks = (real.cumsum(1) - 1).int()
    assert torch.equal(cache.index.positions[real], ranks[real])
    for layer in cache.compressed:
        key, value = layer.states()
        assert key.shape[2] == value.shape[2] == cache.index.length
        assert key.isfinite().all() and value.isfinite().all()
        blocks = layer.stream.blocks * block_nbytes(layer.stream)
        assert layer.stream.nbytes == blocks + OUTLIER_NBYTES * layer.stream.outliers
