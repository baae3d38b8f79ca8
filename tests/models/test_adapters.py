"""Models with adapters of peft: in layers, before the tokens, and in the place of the cache."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor
from transformers import DynamicCache

from support.models import prompt, tiny
from xquant import KVCache, StaticKVCache, attach, compress, compressed, decompress
from xquant.calibrators.run import calibrate_on
from xquant.compat import CACHE

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:Position ids are not supported"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]

LINEAR = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "k_proj", "v_proj", "up_proj"]}
BEFORE = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 8}
INSIDE: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(**LINEAR, init_lora_weights=False),
    "dora": lambda: peft.LoraConfig(**LINEAR, init_lora_weights=False, use_dora=True),
    "ia3": lambda: peft.IA3Config(**LINEAR, feedforward_modules=["up_proj"], init_ia3_weights=False),
}
AHEAD: dict[str, Callable[[], Any]] = {
    "prompt": lambda: peft.PromptTuningConfig(**BEFORE),
    "p-tuning": lambda: peft.PromptEncoderConfig(**BEFORE, encoder_hidden_size=16),
}
UNSEEN = pytest.mark.skipif(
    CACHE == "cache" and Version(peft.__version__) <= Version("0.21.2"),
    reason="this peft looks for `past_key_values` where `generate` of transformers 5.24 has `cache`: with any"
    " cache it puts a prompt before each step, and leaves a prefix out",
)
SPECS = ["kivi-16bit:group=32", "xquant-16bit:group=32", "xquant-cl-16bit:group=32,first_bits=16"]
PREFIX = "peft's prefix tuning gives the model a cache with the prefix in it, in place of any other"


def tuned(config: Any) -> Any:
    torch.manual_seed(3)
    model = peft.get_peft_model(tiny("llama"), config).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.5)
    return model


def prefixed() -> Any:
    return tuned(peft.PrefixTuningConfig(**BEFORE))


def tokens(model: Any, **options: Any) -> Tensor:
    ids = prompt()
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    return model.generate(input_ids=ids, **given, **options)


@pytest.mark.parametrize("kind", [*INSIDE, *(pytest.param(kind, marks=UNSEEN) for kind in AHEAD)])
def test_every_form_generates_as_without(kind: str) -> None:
    model = tuned({**INSIDE, **AHEAD}[kind]())
    inner = model.get_base_model()
    want = tokens(model)
    assert not torch.equal(want, tokens(tiny("llama")))
    for spec in SPECS:
        with compressed(model, spec):
            assert torch.equal(tokens(model), want)
        for cache in (KVCache(model, spec), KVCache(inner, spec)):
            assert torch.equal(tokens(model, past_key_values=cache), want)
            assert cache.get_seq_length() == want.shape[1] - 1 + 8 * (kind in AHEAD)
    cache = StaticKVCache(model, SPECS[0], room=128)
    assert torch.equal(tokens(model, past_key_values=cache), want)


@pytest.mark.parametrize("kind", INSIDE)
def test_the_adapter_in_use_is_a_part_of_the_model(kind: str, tmp_path: Path) -> None:
    """One that is added beside it is not; a cache of one adapter is not one of another."""
    model = tuned(INSIDE[kind]())
    cache = KVCache(model, SPECS[0])
    tokens(model, past_key_values=cache)
    cache.save(tmp_path / "first")
    digests = attach(model).identity.now()
    model.add_adapter("second", INSIDE[kind]())
    assert attach(model).identity.now() == digests
    model.set_adapter("second")
    assert attach(model).identity.now() != digests
    with pytest.raises(ValueError, match="other weights, buffers or adapters"):
        KVCache.load(model, tmp_path / "first")
    model.set_adapter("default")
    assert KVCache.load(model, tmp_path / "first").get_seq_length() == cache.get_seq_length()
    with model.disable_adapter():
        assert attach(model).identity.now() != digests


@contextmanager
def lasting(model: Any, spec: str) -> Iterator[None]:
    compress(model, spec)
    yield
    decompress(model)


@UNSEEN
@pytest.mark.parametrize("block", [compressed, lasting])
def test_prefix_tuning_is_left_alone_within_compressed(block: Callable[..., Any]) -> None:
    model = prefixed()
    inner, ids = model.get_base_model(), prompt()
    want, passed = tokens(model), model(ids, use_cache=True).logits
    assert not torch.equal(want, tokens(tiny("llama")))
    with block(model, SPECS[1]):
        with pytest.warns(UserWarning, match=f"not compressed: {PREFIX}"):
            out = tokens(model, return_dict_in_generate=True)
        assert torch.equal(out.sequences, want)
        assert type(out.past_key_values) is DynamicCache
        assert torch.equal(model(ids, use_cache=True).logits, passed)
        with warnings.catch_warnings(), model.disable_adapter():
            warnings.filterwarnings("error", "this call is not compressed")
            plain = tokens(model, return_dict_in_generate=True)
        assert type(plain.past_key_values) is KVCache
        assert type(inner(ids, use_cache=True).past_key_values) is KVCache
    assert torch.equal(tokens(model), want)


@UNSEEN
def test_prefix_tuning_takes_no_cache_of_ours_and_says_so() -> None:
    model = prefixed()
    inner = model.get_base_model()
    spec = SPECS[0]
    with model.disable_adapter():
        early = KVCache(model, spec)
    filled = KVCache(inner, spec)
    with torch.no_grad():
        inner(prompt(), past_key_values=filled)
    for _ in range(2):
        for make in (
            lambda: KVCache(model, spec),
            lambda: StaticKVCache(model, spec, room=64),
            lambda: calibrate_on(model, prompt(2, 64), "kvquant-2bit"),
            lambda: tokens(model, past_key_values=filled),
            lambda: model(prompt(), past_key_values=early),
        ):
            with pytest.raises(ValueError, match=f"^{PREFIX}: pass none$"):
                make()
        for cache in (KVCache(inner, spec), StaticKVCache(inner, spec, room=64), early):
            with pytest.raises(AttributeError, match=f"has no max_cache_len, and {PREFIX}"):
                tokens(model, past_key_values=cache)
            assert not hasattr(cache, "max_cache_len") and cache.get_seq_length() == 0
    want = tokens(inner)
    with model.disable_adapter():
        assert torch.equal(tokens(model, past_key_values=early), want)
