"""Models whose weights accelerate keeps in host memory or in files, until the module that has them runs."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from support.caches import make_cache
from support.generation import greedy
from support.models import prompt, tiny
from xquant import (
    KVCache,
    PrefixStore,
    StaticKVCache,
    attach,
    compressed,
    pack_weights,
)
from xquant.calibrators.run import calibrate_on
from xquant.linear import PackedLinear
from xquant.models import weights

accelerate = pytest.importorskip("accelerate")

CPU = torch.device("cpu")
SPECS = [
    "kivi-16bit:group=32",
    "xquant-16bit:group=32,form=gqa",
    "xquant-cl-16bit:group=32,first_bits=16",
]


def in_memory(model: Any, folder: Path) -> Any:
    return accelerate.cpu_offload(model, CPU, offload_buffers=True)


def in_files(model: Any, folder: Path) -> Any:
    return accelerate.disk_offload(model, str(folder / "offloaded"), CPU)


def loaded_in_parts(model: Any, folder: Path) -> Any:
    """As `from_pretrained` does it: of the layers every other one is in a file."""
    model.save_pretrained(folder / "model")
    where = {name: "cpu" for name, _ in model.named_children()}
    where = {f"model.{name}": "cpu" for name, _ in model.model.named_children()} | {"lm_head": "cpu"}
    del where["model.layers"]
    where |= {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(5)}
    options = {"device_map": where, "offload_folder": str(folder / "offloaded")}
    other = type(model).from_pretrained(folder / "model", **options)
    other.generation_config = copy.copy(model.generation_config)
    return other


WAYS = [in_memory, in_files, loaded_in_parts]


def on_meta(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.is_meta]


@pytest.mark.parametrize(
    ("family", "way"),
    [
        ("llama", in_memory),
        ("qwen2", in_files),  # with biases
        ("qwen3", loaded_in_parts),  # with a key norm
        ("gpt_oss", in_memory),  # with weights of the attention's own
        ("deepseek_v3", in_files),  # with latents
    ],
)
def test_every_form_works_as_before(family: str, way: Callable[..., Any], tmp_path: Path) -> None:
    whole, model = tiny(family), way(tiny(family), tmp_path)
    away = on_meta(model)
    assert away
    with torch.no_grad():
        want = greedy(model, lambda: DynamicCache(config=model.config))
    for spec in SPECS:

        def static(on: Any, spec: str = spec) -> StaticKVCache:
            return StaticKVCache(on, spec, room=128)

        for make in (lambda on, spec=spec: make_cache(on, spec), static):
            try:
                make(whole)
            except ValueError as refusal:
                with pytest.raises(ValueError) as other:
                    make(model)
                assert str(other.value) == str(refusal)
            else:
                assert torch.equal(greedy(model, lambda make=make: make(model)), want)
            assert on_meta(model) == away
    with compressed(model, SPECS[0]):
        assert torch.equal(model.generate(prompt(), max_new_tokens=12, do_sample=False), want)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_kept_is_of_the_same_model(way: Callable[..., Any], tmp_path: Path) -> None:
    """Whether it was offloaded when it was saved, or is now: files and prefixes."""
    whole, model = tiny("qwen3"), way(tiny("qwen3"), tmp_path)
    assert attach(model).identity.now() == attach(whole).identity.now()
    ids, spec = prompt(1, 300), "xquant-2bit:group=32"
    for first, second in ((whole, model), (model, whole)):
        cache, folder = KVCache(first, spec), tmp_path / type(first).__name__ / str(first is model)
        with torch.no_grad():
            first(ids, past_key_values=cache)
        cache.save(tmp_path / "cache")
        loaded = KVCache.load(second, tmp_path / "cache")
        PrefixStore(folder, first, spec, "1GB").put(cache, ids)
        found = PrefixStore(folder, second, spec, "1GB").get(ids)
        assert found is not None and found.get_seq_length() == 256
        loaded.crop(256 - loaded.get_seq_length())
        with torch.no_grad():
            logits = [second(prompt(1, 5), past_key_values=c).logits for c in (loaded, found)]
        torch.testing.assert_close(*logits)


def test_a_calibration_is_made_as_of_the_whole_model() -> None:
    samples, spec = prompt(2, 64, seed=11), "kvquant-2bit-1%:group=32"
    models = tiny("llama"), in_memory(tiny("llama"), Path())
    theirs, ours = (calibrate_on(model, samples, spec) for model in models)
    assert ours.model == theirs.model
    assert all(torch.equal(ours.tensors[name], theirs.tensors[name]) for name in theirs.tensors)


def test_weights_in_files_are_read_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, read = in_files(tiny("llama"), tmp_path), 0
    own = weights.InFile.read

    def counted(self: weights.InFile) -> Tensor:
        nonlocal read
        read += 1
        return own(self)

    monkeypatch.setattr(weights.InFile, "read", counted)
    spec = "xquant-4bit:group=32"
    digests = attach(model).identity.now()
    first = KVCache(model, spec)
    count = read
    assert count
    assert KVCache(model, spec).stack.codecs is first.stack.codecs
    assert attach(model).identity.now() == digests and read == count


def test_weights_that_change_where_they_are_kept_are_noticed(tmp_path: Path) -> None:
    in_file, kept = in_files(tiny("llama"), tmp_path), in_memory(tiny("llama"), tmp_path)
    projection = kept.model.layers[1].self_attn.v_proj
    for model in (in_file, kept):
        digests, cache = attach(model).identity.now(), KVCache(model, "xquant-16bit:group=32")
        if model is kept:
            weights.at_hand(projection, "weight", projection.weight).mul_(2)
        else:
            file = tmp_path / "offloaded" / "model.layers.1.self_attn.v_proj.weight.dat"
            file.write_bytes(bytes(file.stat().st_size))
        assert attach(model).identity.now() != digests
        with torch.no_grad():
            want = greedy(model, lambda model=model: DynamicCache(config=model.config))
        assert torch.equal(greedy(model, lambda cache=cache: cache), want)


def test_a_model_that_is_offloaded_or_brought_back_later(tmp_path: Path) -> None:
    spec = "xquant-16bit:group=32"
    for family in ("llama", "deepseek_v3"):
        model = tiny(family)
        spec = spec if family == "llama" else "kivi-16bit:group=32"
        cache = KVCache(model, spec)
        with torch.no_grad():
            want = greedy(model, lambda model=model: DynamicCache(config=model.config))
        assert torch.equal(greedy(model, lambda cache=cache: cache), want)
        for change in (in_memory, lambda m, _: accelerate.hooks.remove_hook_from_submodules(m)):
            change(model, tmp_path)
            cache.reset()
            if family == "llama":
                assert torch.equal(greedy(model, lambda cache=cache: cache), want)
            fresh = KVCache(model, spec)
            assert torch.equal(greedy(model, lambda cache=fresh: cache), want)


def test_the_angles_of_a_model_take_no_copy_of_its_weights() -> None:
    model = in_memory(tiny("llama"), Path())
    rope = attach(model).view.rope
    assert weights.offloading(rope._copy()) is weights.offloading(model.model.rotary_emb)


def test_offloaded_weights_are_not_packed() -> None:
    model = in_memory(tiny("llama"), Path())
    down = model.model.layers[0].mlp.down_proj
    down._hf_hook.pre_forward(down)  # as a pass leaves it that was interrupted
    pack_weights(model)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())


# -- refusals ------------------------------------------------------------------------------------------


def by_blocks(model: Any, folder: Path) -> Any:
    options = {"execution_device": CPU, "offload": True, "weights_map": model.state_dict()}
    preload = {"preload_module_classes": ["LlamaDecoderLayer"]}
    accelerate.hooks.attach_align_device_hook(model, **options, **preload)
    return model


def unread(model: Any, folder: Path) -> Any:
    """A projection of the third layer tells its weights to nobody, and fails on rows of two dimensions."""
    linear = model.model.layers[2].self_attn.v_proj

    def forward(x: Tensor) -> Tensor:
        if x.dim() == 2:
            raise RuntimeError("no rows of two dimensions here")
        return nn.functional.linear(x, weight)

    weight, linear.weight = linear.weight, nn.Parameter(linear.weight.to(torch.int8), False)
    linear.compute_dtype, linear.forward = torch.float32, forward
    return in_memory(model, folder)


def of_another_kind(model: Any, folder: Path) -> Any:
    def forward(*args: Any, **options: Any) -> Any:
        raise RuntimeError("not in this way")

    model.model.layers[2].self_attn.forward = forward
    return in_memory(model, folder)


@pytest.mark.parametrize(
    ("make", "spec", "why"),
    [
        (by_blocks, "kivi-4bit:group=32", "accelerate offloads each LlamaDecoderLayer as a whole"),
        (unread, "xquant-4bit:group=32", "weights of Linear cannot be decoded"),
        (of_another_kind, "kivi-4bit:group=32", "attention of layer 2 is of another kind .*not in"),
        (in_memory, "kvquant-2bit-1%:group=32", "needs a calibration"),
        (in_memory, "xquant-cl-4bit:group=32,first_layers=6", "first_layers=6"),
    ],
)
def test_a_refusal_is_the_same_every_time_and_leaves_nothing(
    make: Callable[..., Any], spec: str, why: str, tmp_path: Path
) -> None:
    model = make(tiny("llama"), tmp_path)

    def seen() -> list[Any]:
        modules = [
            (sorted(vars(m)), m.training, len(m._forward_hooks), len(m._forward_pre_hooks))
            for m in model.modules()
        ]
        return [modules, on_meta(model), model.config._attn_implementation]

    before, said = seen(), set()
    forms: list[Callable[[], Any]] = [
        lambda: KVCache(model, spec),
        lambda: KVCache(model, spec, kernel="reference"),
        lambda: StaticKVCache(model, spec, room=64),
    ]

    def block() -> None:
        with compressed(model, spec):
            raise AssertionError

    forms.append(block)
    for form in 2 * forms:
        with pytest.raises(ValueError, match=why) as refusal:
            form()
        said.add(str(refusal.value))
        assert seen() == before
    assert len(said) == 1
