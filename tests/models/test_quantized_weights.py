"""Every method on models whose linear layers are quantized: HQQ, and torchao where it is installed."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from support.caches import make_cache
from support.generation import greedy, padded
from support.method_matrix import IDENTITY, LOW
from support.models import prompt, tiny
from support.quantized_weights import SIZES, hqq, torchao
from support.saved_caches import SOME
from xquant import (
    KVCache,
    PrefixStore,
    StaticKVCache,
    attach,
    compress,
    compressed,
    parse_method,
)
from xquant.calibrators.run import calibrate_on

LONG = pytest.mark.long
EVERY = [
    *(pytest.param(hqq, "qwen2", 4, spec) for spec in [*IDENTITY, *SOME]),
    *(pytest.param(hqq, "qwen2", 4, spec, marks=LONG) for spec in LOW if spec not in SOME),
    *(pytest.param(torchao, "qwen2", 4, spec) for spec in IDENTITY[8:]),
    *(pytest.param(torchao, "qwen2", 4, spec, marks=LONG) for spec in [*IDENTITY[:8], *LOW]),
    *(pytest.param(hqq, "phi3", 8, spec, marks=LONG) for spec in [*IDENTITY, *LOW]),
    *(pytest.param(torchao, "phi3", 8, spec, marks=LONG) for spec in [*IDENTITY, *LOW]),
]


@pytest.mark.parametrize(("library", "family", "bits", "spec"), EVERY)
def test_every_method_works(library: Callable[..., None], family: str, bits: int, spec: str) -> None:
    model = tiny(family, **SIZES)
    library(model, bits)
    for operation in (greedy, padded):
        with torch.no_grad():
            want = operation(model, lambda: DynamicCache(config=model.config))
        got = operation(model, lambda: make_cache(model, spec))
        assert got.shape == want.shape
        if spec in IDENTITY:
            assert torch.equal(got, want)


KINDS: list[tuple[Callable[..., None], int | str]] = [
    (hqq, 8),
    (torchao, 8),
    (torchao, 4),
    (torchao, "float8"),
    (torchao, "int8, inputs too"),
    (torchao, "int4, inputs too"),
]
KEEPS_INPUTS = "xquant-16bit:group=32"


@pytest.mark.parametrize(("library", "bits"), KINDS)
def test_every_form_works(library: Callable[..., None], bits: int | str, tmp_path: Path) -> None:
    """Or says in one line, and always the same, that weights do not make keys and values of inputs."""
    model = tiny("llama", **SIZES)
    library(model, bits)
    ids = prompt(1, 160)
    with torch.no_grad():
        want = greedy(model, lambda: DynamicCache(config=model.config))
    for spec in ("kivi-16bit:group=32", "kivi-16bit:group=32,rope=post", KEEPS_INPUTS):

        def static(spec: str = spec) -> StaticKVCache:
            return StaticKVCache(model, spec, room=128)

        def grown(spec: str = spec) -> KVCache:
            return KVCache(model, spec)

        if spec == KEEPS_INPUTS and "inputs too" in str(bits):
            said = set()
            for make in (grown, static, grown, static):
                with pytest.raises(ValueError, match="because it rounds inputs, too: use") as e:
                    make()
                said.add(str(e.value))
            with pytest.raises(ValueError, match="because it rounds inputs, too: use"):
                compress(model, spec)
            assert len(said) == 1
            continue
        assert torch.equal(greedy(model, grown), want)
        assert static().get_seq_length() == 0
        if "inputs too" not in str(bits):  # which turn the last bit of a product into another code
            assert torch.equal(greedy(model, static), want)
        with compressed(model, spec):
            assert torch.equal(model.generate(prompt(), max_new_tokens=12, do_sample=False), want)
        cache = grown()
        with torch.no_grad():
            model(ids, past_key_values=cache)
        cache.save(tmp_path / "cache")
        store = PrefixStore(tmp_path / spec, model, spec, "1GB")
        store.put(cache, ids)
        with torch.no_grad():
            others = KVCache.load(model, tmp_path / "cache"), store.get(torch.cat([ids, ids], 1))
            assert others[1] is not None and others[1].get_seq_length() == 128
            model(ids[:, 128:], past_key_values=others[1])
            logits = [model(ids, past_key_values=c).logits for c in (cache, *others)]
        for other in logits[1:]:
            torch.testing.assert_close(other, logits[0], rtol=0.1, atol=0.1)


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt2", "phi3", "qwen3"])
def test_every_kind_of_layer_works(family: str) -> None:
    """With latents, with layers that are no ``nn.Linear``, fused, with key norms."""
    model = tiny(family, **SIZES)
    torchao(model, 8)
    spec = "kivi-16bit:group=8"
    with torch.no_grad():
        want = greedy(model, lambda: DynamicCache(config=model.config))
    assert torch.equal(greedy(model, lambda: KVCache(model, spec)), want)


def test_how_weights_are_quantized_makes_another_model() -> None:
    """Also where the numbers are the same, and inputs alone are treated in another way."""
    digests = set()
    for library, bits in 2 * KINDS:
        model = tiny("llama", **SIZES)
        library(model, bits)
        digests.add(attach(model).identity.now())
    assert len(digests) == len(KINDS)


def test_gradients_that_do_not_reach_the_states_are_told_of() -> None:
    model = tiny("llama", **SIZES)
    torchao(model, "int8, inputs too")
    with pytest.raises(ValueError, match=r"no gradients reach the keys .* weighting=none"):
        calibrate_on(model, prompt(2, 64), parse_method("kvquant-2bit-1%:group=8"))
    found = calibrate_on(model, prompt(2, 64), parse_method("kvquant-2bit-1%:group=8,weighting=none"))
    assert found.tensors


def test_what_cannot_be_decoded_is_told() -> None:
    class Opaque(nn.Module):
        in_features, out_features, bias = 48, 24, None
        compute_dtype = torch.float32

        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.codes = nn.Parameter(linear.weight.to(torch.int8), requires_grad=False)
            self.inner = [linear]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.dim() == 2:
                raise RuntimeError("no rows of two dimensions here")
            return self.inner[0](x)

    model = tiny("llama")
    for layer in model.model.layers:
        layer.self_attn.k_proj = Opaque(layer.self_attn.k_proj)
    with torch.no_grad():
        want = greedy(model, lambda: DynamicCache(config=model.config))
        assert torch.equal(greedy(model, lambda: KVCache(model, "kivi-16bit:group=8")), want)
    with pytest.raises(ValueError, match="weights of Opaque cannot be decoded"):
        KVCache(model, "xquant-4bit")
