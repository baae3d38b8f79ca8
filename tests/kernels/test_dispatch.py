"""Which kernel is chosen, and that it is said."""

import pytest
import torch

from models import prompt, tiny
from xquant import KVCache
from xquant.kernels import native

MODEL = {"head_dim": 32, "hidden_size": 128}
needs_native = pytest.mark.skipif(not native.paths(), reason="no native library")


@needs_native
def test_the_best_that_fits_is_chosen() -> None:
    cache = KVCache(tiny("llama", **MODEL), "kivi-4bit:group=32")
    assert cache.report().kernel == native.paths()[0]


@pytest.mark.parametrize(
    ("spec", "options", "why"),
    [
        ("kivi-4bit:group=8", {}, "blocks of 8"),
        ("full:group=32", {}, "rebuilt from other states"),
        ("kivi-16bit:group=32", {}, "not quantized"),
        ("xquant-4bit:group=32", {}, "rebuilt from other states"),
        ("nf5:group=32", {}, "a table of 32 levels"),
        ("int4-gs24:group=32", {}, "ranges of"),
        ("kivi-4bit:group=32", {"attend": "store"}, "every token reads the store"),
        ("kivi-4bit:group=32", {"kernel": "reference"}, "asked for"),
    ],
)
def test_the_reference_says_why(spec: str, options: dict[str, str], why: str) -> None:
    cache = KVCache(tiny("llama", **MODEL), spec, **options)
    assert cache.report().kernel.startswith("reference") and why in cache.report().kernel
    cache_with_kernel = {**options, "kernel": "avx2"}
    if options.get("kernel") is None:
        with pytest.raises(ValueError, match="kernel 'avx2' cannot be used"):
            KVCache(tiny("llama", **MODEL), spec, **cache_with_kernel)


def test_a_kernel_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="kernel is one of auto, avx512, avx2, reference"):
        KVCache(tiny("llama"), "kivi-4bit", kernel="fast")


def test_without_the_library_the_reference_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    model = tiny("llama", **MODEL)
    cache = KVCache(model, "kivi-4bit:group=32")
    assert cache.report().kernel == "reference (installed without the native library)"
    model.generate(prompt(), past_key_values=cache, max_new_tokens=3)


@needs_native
def test_gradients_and_attention_weights_are_the_references() -> None:
    model = tiny("llama", **MODEL)
    cache = KVCache(model, "kivi-4bit:group=32")
    with torch.no_grad():
        model(prompt(), past_key_values=cache, use_cache=True)
    out = model(prompt(1, 2), past_key_values=cache, use_cache=True)
    assert out.logits.requires_grad
    out.logits.sum().backward()
