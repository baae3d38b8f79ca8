"""KVCache as a transformers cache: attaching, refusing, reporting, and reading through the store."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from support.block_sizes import block_nbytes
from support.caches import make_cache
from support.method_matrix import LOW, OWN
from support.models import left_padded, prompt, tiny
from xquant import KVCache, attach, parse_method
from xquant.methods import METHODS
from xquant.past.growing_layer import CompressedLayer
from xquant.past.rows import ROOM
from xquant.quant import Ragged, Segment
from xquant.quant.quantizer import OUTLIER_NBYTES


def logits(model: Any, ids: torch.Tensor, cache: Any = None, **kwargs: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(ids, past_key_values=cache, use_cache=cache is not None, **kwargs).logits


def hooks(model: nn.Module) -> int:
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._forward_hooks_always_called)
        for m in model.modules()
    )


def test_attach_is_idempotent() -> None:
    model = tiny("llama")
    first = attach(model)
    count = hooks(model)
    KVCache(model, "kivi-2bit")
    assert attach(model) is first
    assert hooks(model) == count


def test_codecs_are_built_once_and_again_when_weights_change() -> None:
    model = tiny("llama")
    first = KVCache(model, "xquant-4bit").compressed[0].codec
    assert KVCache(model, "xquant-4bit").compressed[0].codec is first
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(2)
    cache = KVCache(model, "xquant-16bit:group=8")
    assert KVCache(model, "xquant-4bit").compressed[0].codec is not first
    got = logits(model, prompt(), KVCache(model, "xquant-16bit:group=8", attend="store"))
    assert torch.allclose(got, logits(model, prompt()), atol=1e-3)
    del cache


def test_an_attached_model_still_takes_other_caches() -> None:
    model = tiny("llama")
    want = logits(model, prompt(), DynamicCache(config=model.config))
    attach(model)
    assert torch.equal(logits(model, prompt(), DynamicCache(config=model.config)), want)


@pytest.mark.parametrize("when", ["before", "after"])
@torch.inference_mode()
def test_other_attention_implementations_get_whole_keys_and_values(when: str) -> None:
    AttentionInterface.register("mine", sdpa_attention_forward)
    AttentionMaskInterface.register("mine", AttentionMaskInterface()["sdpa"])
    model = tiny("llama")
    want = model.generate(prompt(), max_new_tokens=20, do_sample=False)
    if when == "before":
        model.set_attn_implementation("mine")
    cache = KVCache(model, "xquant-16bit:group=8")
    if when == "after":
        model.set_attn_implementation("mine")
    got = model.generate(prompt(), max_new_tokens=20, do_sample=False, past_key_values=cache)
    assert torch.equal(got, want)


# -- refusing --------------------------------------------------------------------------------------


def test_a_cache_of_another_model_is_refused() -> None:
    model, attached, other = tiny("llama"), tiny("llama"), tiny("llama")
    attach(attached)
    for stranger in (attached, other):
        cache = KVCache(model, "kivi-2bit")
        with pytest.raises(ValueError, match="made for"):
            logits(stranger, prompt(), cache)
        assert cache.get_seq_length() == 0
        assert logits(model, prompt(), cache).isfinite().all()


def test_another_batch_size_is_refused_and_leaves_the_cache_whole() -> None:
    model = tiny("gemma3")
    cache = KVCache(model, "kivi-2bit:group=8")
    logits(model, prompt(2), cache)
    with pytest.raises(ValueError, match="batch of 2, the input has 3"):
        logits(model, prompt(3, 1), cache)
    assert [layer.get_seq_length() for layer in cache.layers] == [40] * 5
    assert logits(model, prompt(2, 1), cache).isfinite().all()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_nan_is_refused_and_leaves_the_cache_as_it_was(family: str) -> None:
    model, cache = tiny(family), None
    want = logits(model, prompt(1, 50))[:, 40:]
    cache = KVCache(model, "kivi-16bit:group=8")
    logits(model, prompt(1, 50)[:, :40], cache)

    def poison(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return output * torch.nan

    handle = model.model.layers[2].mlp.register_forward_hook(poison)
    with pytest.raises(ValueError, match="NaN or infinity in the hidden states of layer 3"):
        logits(model, prompt(1, 9, seed=5), cache)
    handle.remove()
    assert [layer.get_seq_length() for layer in cache.layers] == [40] * 5
    assert cache.index.length == 40
    assert torch.allclose(logits(model, prompt(1, 50)[:, 40:], cache), want, atol=1e-4)


def test_a_static_or_compiled_cache_is_refused() -> None:
    model = tiny("llama")
    with pytest.raises(ValueError, match="cache_implementation"):
        model.generate(
            prompt(),
            max_new_tokens=2,
            cache_implementation="static",
            past_key_values=KVCache(model, "kivi-2bit"),
        )
    assert not KVCache(model, "kivi-2bit").is_compileable


def test_direct_updates_are_refused() -> None:
    cache = KVCache(tiny("llama"), "kivi-2bit")
    states = torch.randn(1, 2, 3, 12)
    with pytest.raises(ValueError, match="filled by forward passes"):
        cache.update(states, states, 0)


def test_what_is_not_a_supported_model_is_refused_by_name() -> None:
    from transformers import GPTJConfig, GPTJForCausalLM, MambaConfig, MambaForCausalLM

    with pytest.raises(TypeError, match="Linear"):
        KVCache(nn.Linear(2, 2), "full")
    mamba = MambaForCausalLM(MambaConfig(num_hidden_layers=1, hidden_size=16, vocab_size=20))
    with pytest.raises(ValueError, match="MambaForCausalLM is not supported"):
        KVCache(mamba, "full")
    gptj = GPTJForCausalLM(GPTJConfig(n_layer=1, n_embd=32, n_head=2, rotary_dim=8, vocab_size=20))
    with pytest.raises(ValueError, match=r"GPTJForCausalLM: its keys are .*rope=post"):
        KVCache(gptj, "kivi-4bit")
    with pytest.raises(ValueError, match=r"no full-attention layer.*sliding window of 16"):
        KVCache(tiny("mistral", sliding_window=16), "full")


def test_bad_arguments_are_refused() -> None:
    model = tiny("llama")
    with pytest.raises(ValueError, match="attend is chunk or store"):
        KVCache(model, "full", attend="all")
    with pytest.raises(ValueError, match="only 5 layers are compressed"):
        KVCache(model, "xquant-cl-2bit:first_layers=6")
    with pytest.raises(ValueError, match="outlier=true needs the gqa form"):
        KVCache(model, "xquant-2bit:outlier=true,form=mha")


# -- reading through the store ---------------------------------------------------------------------


@pytest.mark.parametrize("spec", [s for s in LOW if parse_method(s).causal])
@torch.no_grad()
def test_reading_through_the_store_reads_what_a_later_token_would(spec: str) -> None:
    """64 tokens are whole blocks of all: what a store-reading pass saw is what the store then holds."""
    model = tiny("llama")
    spec = re.sub(",tail=[0-9]", ",tail=0", spec)
    cache = make_cache(model, spec, attend="store")
    seen = {}
    read = CompressedLayer.read

    def record(layer: CompressedLayer, *args: Any) -> Any:
        seen[layer] = read(layer, *args)
        return seen[layer]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompressedLayer, "read", record)
        logits(model, prompt(2, 64), cache)
    for layer in cache.compressed:
        assert layer.stream.tokens == 64
        key, value = layer.states()
        assert torch.equal(seen[layer][0], key)
        assert torch.equal(seen[layer][1], value)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_tail_longer_than_the_text_reads_everything_exactly(family: str) -> None:
    model = tiny(family)
    want = logits(model, prompt())
    got = logits(model, prompt(), KVCache(model, "kivi-1bit:group=8,tail=40", attend="store"))
    assert torch.allclose(got, want, atol=1e-4)
    far = logits(model, prompt(), KVCache(model, "kivi-1bit:group=8,tail=4", attend="store"))
    assert torch.allclose(far[:, :4], want[:, :4], atol=1e-4)
    assert not torch.allclose(far[:, 20:], want[:, 20:], atol=1e-1)


def test_padding_does_not_change_what_is_stored() -> None:
    """A prompt alone and the same prompt left-padded in a batch decode to the same logits."""
    model = tiny("llama")
    batch = left_padded([40, 16])
    cache = KVCache(model, "kivi-2bit:group=8,sink=1", attend="store")
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    both = logits(
        model,
        batch["input_ids"],
        cache,
        attention_mask=batch["attention_mask"],
        position_ids=positions,
    )
    alone = logits(
        model,
        batch["input_ids"][1:, 24:],
        KVCache(model, "kivi-2bit:group=8,sink=1", attend="store"),
    )
    assert torch.allclose(both[1:, 24:], alone, atol=1e-4)


# -- bytes -----------------------------------------------------------------------------------------


def flat(packed: Any) -> Iterator[torch.Tensor]:
    for field in packed.values():
        yield from field.blocks if isinstance(field, Ragged) else field.slabs


def tables(segment: Segment) -> list[torch.Tensor]:
    return getattr(segment.quantizer, "tables", [])


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_report_counts_every_byte(family: str, name: str) -> None:
    model = tiny(family)
    spec = METHODS[name].example + ":group=16,sink=1"
    cache = make_cache(model, spec)
    assert cache.report().bits_per_value == 0
    logits(model, prompt(2, 43), cache)
    report = cache.report()
    held: set[int] = set()
    total = 0
    layers = cache.compressed
    sinks = [layer.sinks for layer in layers if layer.sinks is not None]
    built = [layer.built for layer in layers]
    parts = [*built, *(layer.stream for layer in layers)]
    for owner in [*layers, *sinks, cache.index, *parts]:
        tensors = [t for t in vars(owner).values() if isinstance(t, torch.Tensor)]
        tensors = [t for t in tensors if t is not cache.stack.codecs[0].embedding]
        tensors += [t for packed in getattr(owner, "pool", []) for t in flat(packed)]
        tensors += [t for s in getattr(owner, "segments", ()) for t in tables(s)]
        for tensor in tensors:
            if tensor.data_ptr() not in held:
                held.add(tensor.data_ptr())
                room = tensor.untyped_storage().nbytes() - tensor.nbytes
                follow = ROOM * tensor[:, :1].nbytes if owner in (*layers, *built) else 0
                assert room <= follow, "a view keeps more alive"
                total += tensor.nbytes
    assert report.cache_bytes - report.skipped_bytes == total
    assert (report.tokens, report.batch) == (43, 2)
    streams = [layer.stream for layer in cache.compressed]
    sealed = sum(s.blocks * block_nbytes(s) + OUTLIER_NBYTES * s.outliers for s in streams)
    assert sum(report.sealed_bytes.values()) == sealed
    sealed += report.table_bytes
    values = sum(2 * c.codec.view.kv_width * 2 * 32 for c in cache.compressed)
    ids = 0 if cache.stack.codecs[0].embedding is None else 4 * 2 * 32
    assert report.bits_per_value == pytest.approx(8 * (sealed + report.sink_bytes + ids) / values)
    assert str(report).splitlines()
    assert report.layers_skipped == ({} if family == "llama" else {
        0: "sliding window of 16 tokens", 2: "sliding window of 16 tokens"
    })  # fmt: skip


def test_repeated_sequences_share_their_blocks() -> None:
    model = tiny("llama")
    cache = KVCache(model, "kivi-2bit:group=8")
    logits(model, prompt(), cache)
    before = sum(cache.report().sealed_bytes.values())
    cache.batch_repeat_interleave(4)
    report = cache.report()
    assert (report.batch, sum(report.sealed_bytes.values())) == (4, before)
