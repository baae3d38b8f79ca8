"""PrefixStore of models with layers that are not compressed: sliding windows, states of linear attention."""

import copy
from functools import cache as memoize
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import DynamicCache, Lfm2Config, Lfm2ForCausalLM

from support.caches import calibration
from support.models import COMMON, left_padded, prompt, tiny
from xquant import KVCache, PrefixStore, parse_method, prefixes

FAMILIES = ["qwen3_next", "qwen3_5", "falcon_h1", "granitemoehybrid", "lfm2", "gemma3", "gemma4", "gpt_oss"]
EXACT = "full:group=32"
LOSSY = ["kivi-2bit:group=32,sink=2", "tc-2bit:group=16", "int8:group=128", "xquant-4bit:group=32"]
IDS = prompt(1, 400)
MORE = prompt(1, 24, seed=5)


@memoize
def model_of(family: str) -> Any:
    """With weights that make something of a state that is lost."""
    with torch.inference_mode(False):
        if family != "lfm2":
            return tiny(family, initializer_range=0.2)
        torch.manual_seed(0)
        own = {"layer_types": ["conv", "full_attention"] * 2 + ["conv"], "initializer_range": 0.2}
        return Lfm2ForCausalLM(Lfm2Config(**{**COMMON, **own}, block_auto_adjust_ff_dim=False)).eval()


@memoize
def wide_model() -> Any:
    """With rows of states that are long enough to be coded."""
    with torch.inference_mode(False):
        own = {"linear_key_head_dim": 32, "linear_value_head_dim": 64, "head_dim": 32}
        return tiny("qwen3_next", initializer_range=0.2, **own)


def store_of(folder: Path, model: Any, spec: str = EXACT, **how: Any) -> PrefixStore:
    return PrefixStore(folder, model, spec, calibration=calibration(model, parse_method(spec)), **how)


@torch.no_grad()
def read(model: Any, cache: Any, ids: Tensor, **given: Any) -> Tensor:
    logits: Tensor = model(ids, past_key_values=cache, **given).logits
    return logits


def go_on(model: Any, cache: KVCache, ids: Tensor) -> Tensor:
    return torch.cat([read(model, cache, part) for part in ids.split([1, 20, 3], 1)], 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefix_goes_on_as_if_nothing_had_been_stored(family: str, tmp_path: Path) -> None:
    """After the end of what was read, and after a checkpoint on the way to it."""
    model, store = model_of(family), store_of(tmp_path, model_of(family))
    held = store.prefill(IDS, every=150)
    assert held.get_seq_length() == 399
    branch = torch.cat([IDS[:, :320], prompt(1, 80, seed=9)], 1)
    for ids, length in ((IDS, 399), (branch, 300), (IDS[:, :300], 150), (IDS[:, :301], 300)):
        found = store.get(ids)
        assert found is not None and found.get_seq_length() == length
        own = DynamicCache(config=model.config)
        rest = torch.cat([ids[:, length:], MORE], 1)
        read(model, own, ids[:, :length])
        wanted, got = read(model, own, rest), read(model, found, rest)
        torch.testing.assert_close(got, wanted, atol=2e-3, rtol=2e-3)
        assert torch.equal(got.argmax(-1), wanted.argmax(-1))
    assert store.get(IDS[:, :150]) is None and store.get(prompt(1, 400, seed=2)) is None


@pytest.mark.parametrize("spec", LOSSY)
@pytest.mark.parametrize("family", ["falcon_h1", "gemma3"])
def test_a_lossy_prefix_is_the_cache_that_was_put(family: str, spec: str, tmp_path: Path) -> None:
    model = model_of(family)
    made = calibration(model, parse_method(spec))
    store, cache = store_of(tmp_path, model, spec), KVCache(model, spec, calibration=made)
    read(model, cache, IDS[:, :390])
    read(model, cache, IDS[:, 390:])
    assert store.put(cache, IDS) == [400]
    files = {file: file.stat().st_ino for file in tmp_path.glob("*.safetensors")}
    assert store.put(copy.deepcopy(cache), IDS) == [400]
    assert files == {file: file.stat().st_ino for file in tmp_path.glob("*.safetensors")}
    found = store.get(torch.cat([IDS, MORE], 1))
    assert found is not None and found.get_seq_length() == 400
    assert torch.equal(go_on(model, found, MORE), go_on(model, cache, MORE))


@pytest.mark.parametrize("family", ["qwen3_5", "gemma3"])
def test_generate_goes_on_from_what_was_read(family: str, tmp_path: Path) -> None:
    model, store = model_of(family), store_of(tmp_path, model_of(family))
    wanted = model.generate(IDS, max_new_tokens=9)
    cache = store.prefill(IDS, every=128)
    assert torch.equal(model.generate(IDS, past_key_values=cache, max_new_tokens=9), wanted)
    assert store.put(cache, wanted[:, : cache.get_seq_length()]) == [cache.get_seq_length()]
    second = torch.cat([wanted, MORE], 1)
    found = store.get(second)
    assert found is not None and found.get_seq_length() == 408
    again = model.generate(second, past_key_values=found, max_new_tokens=9)
    assert torch.equal(again, model.generate(second, max_new_tokens=9))


def test_padded_sequences_are_stored_as_if_they_were_alone(tmp_path: Path) -> None:
    model, store = model_of("gemma3"), store_of(tmp_path, model_of("gemma3"), "int8:group=32")
    batch = left_padded([300, 40, 170])
    ids, mask = batch["input_ids"], batch["attention_mask"]
    cache = KVCache(model, EXACT)
    read(model, cache, ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    assert store.put(cache, ids) == [300, 40, 170]
    for i, length in enumerate((300, 40, 170)):
        own = ids[i : i + 1, 300 - length :]
        found = store.get(torch.cat([own, MORE], 1))
        assert found is not None and found.get_seq_length() == length
        wanted = read(model, None, torch.cat([own, MORE], 1))[:, length:]
        error = (read(model, found, MORE) - wanted).norm() / wanted.norm()
        assert error < 0.02


def test_padding_within_a_window_is_refused(tmp_path: Path) -> None:
    model, store = model_of("gemma3"), store_of(tmp_path, model_of("gemma3"))
    mask = torch.ones_like(IDS)
    mask[:, 395:398] = 0
    cache = KVCache(model, EXACT)
    read(model, cache, IDS, attention_mask=mask, position_ids=(mask.cumsum(1) - 1))
    with pytest.raises(ValueError, match="padding among its newest tokens"):
        store.put(cache, IDS)


@pytest.mark.parametrize(("bits", "most"), [(32, 1e-6), (16, 1e-4), (8, 0.02)])
def test_states_take_as_many_bits_as_asked(bits: int, most: float, tmp_path: Path) -> None:
    model = wide_model()
    store = store_of(tmp_path, model, state_bits=bits)
    cache = store.prefill(IDS, every=512)
    found = store.get(IDS)
    assert found is not None
    name = next(tmp_path.glob("*-*.safetensors"))
    stored = {n: t for n, t in load_file(name).items() if n.endswith("recurrent.0")}
    assert stored and all(8 * tensor.itemsize == bits for tensor in stored.values())
    for layer, other in zip(cache.layers, found.layers, strict=True):
        if hasattr(layer, "recurrent_states"):
            state = layer.recurrent_states[0]
            assert (other.recurrent_states[0] - state).norm() < most * state.norm()
    wanted, got = (read(model, each, IDS[:, 399:]) for each in (cache, found))
    assert (got - wanted).norm() < 10 * most * wanted.norm()
    assert store_of(tmp_path, model, state_bits=16 if bits == 8 else 8).get(IDS) is None


@pytest.mark.parametrize("family", ["falcon_h1", "gemma3"])
def test_what_was_altered_is_left_out(family: str, tmp_path: Path) -> None:
    """A checkpoint or a chunk that is damaged, gone or another's costs the tokens after the one before."""
    store = store_of(tmp_path, model_of(family))
    store.prefill(IDS, every=150)
    names = {int(file.stem.split("-")[1]): file for file in tmp_path.glob("*-*.safetensors")}
    assert names.keys() == {150, 300, 399}
    content = names[399].read_bytes()
    names[399].write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.warns(UserWarning, match="its bytes were altered"):
        found = store.get(IDS)
    assert found is not None and found.get_seq_length() == 300 and not names[399].exists()
    held = load_file(names[300])
    chain = sorted(file for file in tmp_path.glob("*.safetensors") if "-" not in file.stem)
    assert len(chain) == 3
    for name in held:
        if name.partition(".")[0].isdecimal():
            _put_as(store, names[300], {**held, name: torch.cat([held[name]] * 2)})
            break
    with pytest.warns(UserWarning, match="is damaged"):
        found = store.get(IDS)
    assert found is not None and found.get_seq_length() == 150
    for file in chain:
        file.unlink()
    assert store.get(IDS) is None


def _put_as(store: PrefixStore, file: Path, tensors: dict[str, Tensor]) -> None:
    """Put other tensors under a name, with a digest that fits."""
    file.unlink()
    store._shelf.put([file.stem], lambda _: tensors)


def test_the_end_of_a_prompt_is_dropped_first(tmp_path: Path) -> None:
    model, store = model_of("gemma3"), store_of(tmp_path, model_of("gemma3"))
    store.prefill(IDS, every=150)
    limit = store.nbytes - 1
    small = PrefixStore(tmp_path, model, EXACT, limit=limit)
    found = small.get(IDS)
    assert found is not None and found.get_seq_length() == 300


def test_long_parts_are_read_in_shorter_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "PART", 70)
    store = store_of(tmp_path, model_of("gemma3"))
    read_at_once: list[int] = []
    handle = store._model.register_forward_pre_hook(lambda _, args: read_at_once.append(args[0].shape[1]))
    store.prefill(IDS, every=150)
    handle.remove()
    assert read_at_once == [70, 70, 10, 70, 70, 10, 70, 29]
    ends = {int(file.stem.split("-")[1]) for file in tmp_path.glob("*-*.safetensors")}
    assert ends == {150, 300, 399}


def test_nan_in_a_state_is_refused(tmp_path: Path) -> None:
    model, store = model_of("qwen3_next"), store_of(tmp_path, model_of("qwen3_next"))
    cache = KVCache(model, EXACT)
    read(model, cache, IDS)
    layer = next(layer for layer in cache.layers if hasattr(layer, "recurrent_states"))
    layer.recurrent_states[0][..., 0] = torch.nan
    with pytest.raises(ValueError, match="holds NaN or infinity"):
        store.put(cache, IDS)
    assert store.get(torch.cat([IDS, MORE], 1)) is None


def test_what_cannot_be_asked_is_refused(tmp_path: Path) -> None:
    model = model_of("gemma3")
    with pytest.raises(ValueError, match="state_bits is one of 8, 16, 32, not 4"):
        PrefixStore(tmp_path / "s", model, EXACT, state_bits=4)
    store = store_of(tmp_path, model)
    for ids, every in ((IDS, 0), (IDS[:, :1], 9)):
        with pytest.raises(ValueError, match="are the least"):
            store.prefill(ids, every)
    with pytest.raises(ValueError, match="one prompt"):
        store.prefill(prompt(2, 20))
    assert store.nbytes == 0


def test_prefill_of_a_model_whose_layers_are_all_compressed(tmp_path: Path) -> None:
    model = tiny("llama")
    store = PrefixStore(tmp_path, model, "int8:group=32")
    cache = store.prefill(IDS[0].tolist(), every=100, method="kivi-4bit")
    assert cache.get_seq_length() == 399 and cache.method.spec == "kivi-4bit"
    found = store.get(IDS)
    assert found is not None and found.get_seq_length() == 384
