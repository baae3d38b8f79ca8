"""Latents (MLA): what is kept of them, and attention that reads them as they are."""

from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, DynamicCache, MiniCPM3Config, MiniCPM3ForCausalLM

from support.caches import calibration, rows_held
from support.models import COMMON, left_padded, prompt, tiny
from xquant import KVCache, attach
from xquant.analysis.memory import CacheLayout
from xquant.analysis.shapes import Skeleton
from xquant.models.latent import Coded, Exact, Latents
from xquant.spec import parse_method


def some_latents(heads: int, count: int, length: int) -> tuple[Latents, tuple[torch.Tensor, ...]]:
    projection = torch.nn.Linear(32, heads * (16 + 12), bias=False)
    states = torch.randn(2, heads, count, 16 + 8), torch.randn(2, 1, length, 32)
    return Latents(projection, 16, 12), (*states, torch.randn(2, 1, length, 8))


@pytest.mark.parametrize("masked", ["", "bool", "float"])
@pytest.mark.parametrize("count", [1, 3])
@torch.no_grad()
def test_absorbed_attention_is_attention(count: int, masked: str) -> None:
    latents, (query, latent, rotated) = some_latents(4, count, 19)
    key, value = latents.expand(latent, rotated)
    seen = torch.ones(count, 19, dtype=torch.bool).tril(19 - count).repeat(2, 1, 1, 1)
    if masked:
        seen[1, ..., :5] = False
    want = (query @ key.mT * 0.2).masked_fill(~seen, -torch.inf).softmax(-1) @ value
    lowest = torch.finfo(torch.float32).min
    mask = {"": None, "bool": seen, "float": torch.zeros(seen.shape).masked_fill(~seen, lowest)}
    found = latents.attend(query, [Exact(latent[:, 0], rotated[:, 0])], mask[masked], 0.2)
    torch.testing.assert_close(found, want.transpose(1, 2), rtol=1e-4, atol=1e-5)
    # The same where the first twelve tokens are kept as other numbers, but for some sinks.
    weight, bias = torch.linalg.qr(torch.randn(40, 40))[0], torch.randn(40)
    states = torch.cat([latent, rotated], -1)[:, 0]
    rows = (states[:, :12] - bias) @ weight
    columns = torch.tensor([[0, 3, 4], [5, 12, 12]])
    sinks = Exact(*(states[torch.arange(2)[:, None], columns].split((32, 8), -1)))
    rows[torch.arange(2)[:, None], columns.clamp(max=11)] = 99.0 * (columns < 12)[..., None]
    rows[1, 11] = (states[1, 11] - bias) @ weight
    coded = Coded(rows, weight, bias, sinks, columns)
    parts = [coded, Exact(*states[:, 12:].split((32, 8), -1))]
    found = latents.attend(query, parts, mask[masked], 0.2)
    torch.testing.assert_close(found, want.transpose(1, 2), rtol=1e-3, atol=1e-4)


def test_steps_read_latents_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("deepseek_v3")
    expanded: list[int] = []
    attention = model.model.layers[0].self_attn
    attention.kv_b_proj.register_forward_hook(lambda m, args, out: expanded.append(args[0].shape[-2]))
    cache = KVCache(model, "kivi-4bit:group=8")
    with torch.no_grad():
        for ids in prompt(1, 40).split([36, 1, 1, 2], 1):
            model(ids, past_key_values=cache, use_cache=True)
    assert expanded == [36, 1, 1, 2]
    assert "absorbed" in cache.kernel


@pytest.mark.parametrize(
    "spec", ["tc-4bit:group=16", "tc-4bit:group=16,sink=0", "tc-3bit:group=16,basis=keys-first"]
)
def test_codes_are_attended_to_without_making_latents(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With padding, sinks and tokens that are not packed yet."""
    model = tiny("deepseek_v3")
    made, given = calibration(model, spec), left_padded([60, 41])
    caches = [KVCache(model, spec, calibration=made) for _ in range(2)]
    logits = []
    for cache, of_states in zip(caches, (False, True), strict=True):
        if of_states:  # as for a codec without such a matrix
            monkeypatch.setattr(type(cache.codecs[0]), "to_states", None)
        ids, mask = given["input_ids"], given["attention_mask"]
        with torch.no_grad():
            model(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
            for step in range(1, 8):
                ids, mask = prompt(2, 2, seed=step), torch.cat([mask, mask.new_ones(2, 2)], 1)
                out = model(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
        assert "absorbed" in cache.kernel
        logits.append(out.logits)
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("coded", ["tc-4bit:group=16", "tc-cl-4bit:group=16,embedding=false"])
def test_the_loudest_channels_get_more_than_8_bits(coded: str) -> None:
    model = tiny("deepseek_v3")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.kv_a_layernorm.weight[:2] = 1000.0
    held = []
    for spec in ("full", coded):
        cache = KVCache(model, spec, calibration=calibration(model, spec))
        with torch.inference_mode():
            model(prompt(1, 64), past_key_values=cache)
        held.append(rows_held(cache)[0])
    full, read = held
    error = (read - full).square().mean(0).sqrt() / full.square().mean(0).sqrt()
    # Codes of 8 bits leave a 128th.
    assert error[:2].max() < 1 / 400
    assert 1 / 100 < error[2:].mean() < 1 / 3


def test_what_asks_for_weights_gets_them() -> None:
    model = tiny("deepseek_v3", attn_implementation="eager")
    caches = KVCache(model, "kivi-16bit:group=8"), DynamicCache(config=model.config)
    for cache in caches:
        with torch.no_grad():
            model(prompt(1, 20), past_key_values=cache, use_cache=True)
    ids = prompt(1, 1, seed=5)
    found, want = (
        model(ids, past_key_values=cache, use_cache=True, output_attentions=True) for cache in caches
    )
    torch.testing.assert_close(found.logits, want.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.attentions[1], want.attentions[1], rtol=1e-4, atol=1e-5)


def test_another_family_too() -> None:
    sizes = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
    config = MiniCPM3Config(**{**COMMON, **sizes, "v_head_dim": 12, "num_key_value_heads": 4})
    torch.manual_seed(0)
    model: Any = MiniCPM3ForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    found, want = (
        model.generate(prompt(2, 30), past_key_values=c, max_new_tokens=12, do_sample=False)
        for c in (KVCache(model, "kivi-16bit:group=8"), DynamicCache(config=config))
    )
    assert torch.equal(found, want)


@pytest.mark.parametrize("spec", ["xquant-4bit", "xquant-cl-2bit"])
def test_layer_inputs_are_refused(spec: str) -> None:
    with pytest.raises(ValueError, match=r"DeepseekV3ForCausalLM: its cache keeps latents"):
        KVCache(tiny("deepseek_v3"), spec)


def test_4_bits_take_less_than_29_percent_at_the_shape_of_deepseek_v3() -> None:
    config = DeepseekV3Config(num_hidden_layers=2, first_k_dense_replace=2, vocab_size=128)
    skeleton = Skeleton(config, torch.bfloat16)
    view = skeleton.view.compressed[0]
    assert (view.kv_width, view.state_width) == (512, 576)
    layout = CacheLayout(skeleton, parse_method("kivi-4bit"))
    assert layout.peak(8192, 1) < 0.29 * 2 * 8192 * 2 * 576


def test_a_report_counts_latents() -> None:
    model = tiny("deepseek_v3")
    cache = KVCache(model, "kivi-4bit:group=32")
    with torch.no_grad():
        model(prompt(1, 320), past_key_values=cache, use_cache=True)
    report = cache.report()
    assert report.full_cache_bytes == 2 * 320 * 5 * (32 + 8)
    # Codes and scales of 32 latents, and of rotated parts: 8 channels take a tile of 16.
    block = 32 * 32 // 2 + 32 * 4 + 32 * 16 // 2 + 32 * 4
    assert sum(report.sealed_bytes.values()) == 10 * 5 * block
    assert attach(model).view.compressed[0].latents is not None
