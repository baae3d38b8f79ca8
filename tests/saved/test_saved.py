"""A cache that was saved and loaded goes on as if it had not been, to the bit."""

import copy
import io
import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import DynamicCache

from support.caches import calibration, make_cache
from support.generation import beams, generate, greedy, sampling
from support.method_matrix import IDENTITY, LOW, RIVALS
from support.models import prompt, tiny
from support.processes import import_path
from support.quantized_weights import SIZES, hqq
from support.saved_caches import SOME, Run, lived, loaded, model_of
from support.unusual_models import SWITCH, long_rope
from xquant import KVCache
from xquant.past.sinks import Sinks
from xquant.saved import writing


@pytest.mark.parametrize("spec", [*IDENTITY, *LOW, *RIVALS])
@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", torch.float32), ("llama", torch.bfloat16), ("gemma3", torch.float32)],
    ids=str,
)
def test_a_cache_of_every_method_goes_on_to_the_bit(
    family: str, dtype: torch.dtype, spec: str, tmp_path: Path
) -> None:
    model = model_of(family, dtype)
    run = lived(model, make_cache(model, spec))
    for layer in run.cache.compressed:
        if layer.sinks is not None:  # where they stand is not in the file
            standing = Sinks.standing(layer.sinks.rows, run.cache.index.sink, layer.stream.tokens)
            assert torch.equal(standing.columns, layer.sinks.columns)
    other = loaded(run.cache, tmp_path / "c")
    blocks = [layer.stream.blocks for layer in run.cache.compressed]
    assert blocks == [layer.stream.blocks for layer in other.compressed]
    assert run.same_with(other)


@pytest.mark.parametrize("attend", ["chunk", "store"])
@pytest.mark.parametrize("spec", ["kivi-2bit:group=8,sink=2,tail=5", "tc-2bit:group=16"])
def test_every_token_through_the_store(attend: str, spec: str, tmp_path: Path) -> None:
    model = model_of("llama")
    run = lived(model, make_cache(model, spec, attend))
    assert run.same_with(loaded(run.cache, tmp_path / "c"))


@pytest.mark.parametrize("length", [0, 1, 5, 8, 9, 31])
@pytest.mark.parametrize("spec", SOME)
def test_a_cache_of_any_length(spec: str, length: int, tmp_path: Path) -> None:
    model = model_of("gemma3")
    run = Run(model, make_cache(model, spec), torch.ones(2, 0, dtype=torch.long))
    if length:
        run.forward(prompt(2, length))
    else:
        run.mask = torch.ones(2, 0, dtype=torch.long)
    assert run.same_with(loaded(run.cache, tmp_path / "c"))


@pytest.mark.parametrize("operation", [greedy, sampling, beams], ids=lambda o: o.__name__)
@pytest.mark.parametrize("spec", SOME)
def test_generate_writes_the_tokens_of_a_run_that_was_not_interrupted(
    spec: str, operation: Any, tmp_path: Path
) -> None:
    model = model_of("llama")
    caches = [make_cache(model, spec), make_cache(model, spec)]
    ids = prompt(2 if operation is beams else 1)[:, :29]
    with torch.inference_mode():
        for cache in caches:
            model(ids, past_key_values=cache)
            if operation is beams:
                cache.batch_repeat_interleave(3)
    ids = ids.repeat_interleave(3, 0) if operation is beams else ids
    other = loaded(caches[1], tmp_path / "c", ids)
    want = operation(model, lambda: caches[0])
    assert torch.equal(operation(model, lambda: other), want)
    assert other.saved_tokens is not None and torch.equal(other.saved_tokens, ids)


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize(
    "spec", ["kivi-4bit:group=32,sink=1", "kvquant-3bit-1%:group=32", "tc-2bit:group=32"]
)
def test_the_kernels_read_what_was_loaded(spec: str, kernel: str, tmp_path: Path) -> None:
    model = tiny("llama", head_dim=32)
    cache = make_cache(model, spec, kernel=kernel)
    run = Run(model, cache, torch.ones(2, 0, dtype=torch.long))
    run.forward(prompt(2, 75))
    cache.save(tmp_path / "c")
    other = KVCache.load(model, tmp_path / "c", calibration(model, spec), kernel)
    assert other.kernel == cache.kernel and (kernel == "auto") != (cache.kernel[:9] == "reference")
    assert run.same_with(other)


def test_both_frequencies_of_a_long_input(tmp_path: Path) -> None:
    model = long_rope()
    run = Run(model, KVCache(model, "kivi-4bit:group=8,sink=1"), torch.ones(1, 0).long())
    for count in (SWITCH - 10, 1, 9, 5, 3):
        run.forward(prompt(1, count, seed=count))
    assert len(run.cache.index.rope_spans) == 2
    assert run.same_with(loaded(run.cache, tmp_path / "c"))


@pytest.mark.parametrize("recording", [False, True])
def test_windows_that_record_what_left_them(recording: bool, tmp_path: Path) -> None:
    model = model_of("gemma3")
    run = Run(model, KVCache(model, "kivi-4bit:group=8"), torch.ones(2, 0).long())
    if recording:
        if not hasattr(run.cache, "activate_past_recording"):
            pytest.skip("this version of transformers records nothing")
        run.cache.activate_past_recording()
    run.forward(prompt(2, 30))
    other = loaded(run.cache, tmp_path / "c")
    assert [getattr(layer, "record_past", False) for layer in other.layers] == [
        getattr(layer, "record_past", False) for layer in run.cache.layers
    ]
    if recording:
        for cache in (run.cache, other):
            cache.crop(-7)
        run.mask = run.mask[:, :-7]
    assert run.same_with(other)


@pytest.mark.parametrize("spec", ["kivi-2bit:group=8", "xquant-2bit:group=8", "tc-2bit:group=16"])
def test_a_model_with_quantized_weights(spec: str, tmp_path: Path) -> None:
    model = tiny("qwen2", **SIZES)
    hqq(model, 4)
    run = lived(model, make_cache(model, spec))
    assert run.same_with(loaded(run.cache, tmp_path / "c"))


def test_shared_blocks_stay_shared_and_are_saved_once(tmp_path: Path) -> None:
    model = model_of("llama")
    run = Run(model, KVCache(model, "kivi-4bit:group=8"), torch.ones(1, 0).long())
    run.forward(prompt(1, 200))
    run.cache.save(tmp_path / "one")
    run.cache.batch_repeat_interleave(8)
    run.cache.save(tmp_path / "eight")
    sizes = [(tmp_path / name).stat().st_size for name in ("one", "eight")]
    own = 8 * 200 * 5 + 8 * 25 * 4  # positions, padding and table
    assert sizes[1] - sizes[0] <= own
    run.mask = run.mask.expand(8, -1)
    other = KVCache.load(model, tmp_path / "eight")
    assert all(layer.stream.blocks == 25 for layer in other.compressed)
    assert run.same_with(other)


def test_packed_blocks_are_not_copied_to_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    run = Run(model, KVCache(model, "kivi-4bit:group=8"), torch.ones(1, 0).long())
    for count in (100, 8, 100, 1):
        run.forward(prompt(1, count))
    held: list[Tensor] = []
    monkeypatch.setattr(
        writing,
        "save_file",
        lambda tensors, *rest, **more: (
            held.extend(tensors.values()),
            save_file(tensors, *rest, **more),
        ),
    )
    run.cache.save(tmp_path / "c")
    written = {tensor.data_ptr() for tensor in held}
    pools = [fields for layer in run.cache.compressed for fields in layer.stream.pool]
    slabs = [slab for fields in pools for blocks in fields.values() for slab in blocks.parts()]
    assert len(slabs) > len(pools) * 3 and all(slab.data_ptr() in written for slab in slabs)


def test_a_converted_and_a_copied_cache(tmp_path: Path) -> None:
    model = model_of("llama")
    run = lived(model, make_cache(model, "tc-cl-2bit:group=16"))
    other = loaded(run.cache, tmp_path / "c")
    run.cache = run.cache.converted("kivi-4bit:group=8")
    assert run.same_with(loaded(run.cache, tmp_path / "c"))
    run = lived(model, make_cache(model, "tc-cl-2bit:group=16"))
    run.cache = run.cache.converted("kivi-4bit:group=8")
    assert run.same_with(other.converted("kivi-4bit:group=8"))


ELSEWHERE = """
import sys
from pathlib import Path
import torch
from test_saved import DTYPES, KERNEL_SPECS, four_steps
from support.models import tiny
from xquant import KVCache
torch.set_num_threads(1)
for dtype in DTYPES:
    for number in range(len(KERNEL_SPECS)):
        model = tiny("llama", head_dim=32).to(dtype)
        file = Path(sys.argv[1]) / f"{number}-{dtype.itemsize}"
        torch.save(four_steps(model, KVCache.load(model, file)), file.with_suffix(".logits"))
"""
KERNEL_SPECS = ["kivi-4bit:group=32,sink=1", "xquant-4bit:group=32"]
DTYPES = [torch.float32, torch.bfloat16]


@torch.inference_mode()
def four_steps(model: Any, cache: KVCache) -> Tensor:
    steps = [model(prompt(1, 1, seed=s), past_key_values=cache).logits for s in range(4)]
    return torch.cat(steps, 1)


@pytest.mark.long
def test_another_process_goes_on_to_the_bit(tmp_path: Path) -> None:
    wanted = {}
    for dtype in DTYPES:
        model = tiny("llama", head_dim=32).to(dtype)
        for number, spec in enumerate(KERNEL_SPECS):
            cache, file = KVCache(model, spec), tmp_path / f"{number}-{dtype.itemsize}"
            with torch.inference_mode():
                model(prompt(1, 75), past_key_values=cache)
            cache.save(file)
            wanted[file] = four_steps(model, cache)
    command = [sys.executable, "-c", ELSEWHERE, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": import_path(Path(__file__).parent)}
    subprocess.run(command, check=True, env=environment)
    for file, want in wanted.items():
        assert torch.equal(torch.load(file.with_suffix(".logits")), want)


def test_an_interrupted_pass_is_left_out(tmp_path: Path) -> None:
    model = model_of("llama")
    run = Run(model, KVCache(model, "kivi-4bit:group=8"), torch.ones(2, 0).long())
    run.forward(prompt(2, 30))

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[3].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model(prompt(2, 20), past_key_values=run.cache)
    handle.remove()
    other = loaded(run.cache, tmp_path / "c")
    assert other.get_seq_length() == 30
    assert run.same_with(other)


@pytest.mark.parametrize("length", [0, 30])
@torch.no_grad()
def test_saving_within_a_forward_pass_is_refused(length: int, tmp_path: Path) -> None:
    model = model_of("llama")
    cache = KVCache(model, "kivi-4bit:group=8")
    if length:
        model(prompt(2, length), past_key_values=cache)
    told: list[str] = []

    def save(*_: Any) -> None:
        with pytest.raises(ValueError, match="within a forward pass") as found:
            cache.save(tmp_path / "c")
        told.append(str(found.value))

    handle = model.model.layers[3].register_forward_pre_hook(save)
    want = Run(model, KVCache(model, "kivi-4bit:group=8"), torch.ones(2, 0).long())
    model(prompt(2, 20, seed=3), past_key_values=cache)
    handle.remove()
    assert len(told) == 1 and not list(tmp_path.iterdir())
    if length:
        want.forward(prompt(2, length))
    want.forward(prompt(2, 20, seed=3))
    assert want.same_with(cache)


def pickled(cache: KVCache) -> Any:
    return pickle.loads(pickle.dumps(cache))


def stored(cache: KVCache) -> Any:
    file = io.BytesIO()
    torch.save({"cache": [cache, cache]}, file)
    file.seek(0)
    first, second = torch.load(file, weights_only=False)["cache"]
    assert first is second
    return first


@pytest.mark.parametrize("way", [pickled, stored])
@pytest.mark.parametrize("spec", SOME)
def test_a_pickled_cache_is_a_saved_one(way: Any, spec: str, tmp_path: Path) -> None:
    """Its model does not come along."""
    model = model_of("llama")
    run = lived(model, make_cache(model, spec))
    run.cache.save(tmp_path / "c")
    found = way(run.cache)
    assert found.content == (tmp_path / "c").read_bytes()
    assert run.same_with(found.load(model, calibration(model, run.cache.method)))


def test_a_shallow_copy_shares_nothing() -> None:
    model = model_of("llama")
    run = Run(model, KVCache(model, "kivi-4bit:group=8"), torch.ones(2, 0).long())
    run.forward(prompt(2, 30))
    assert run.same_with(copy.copy(run.cache))


def test_the_file_is_whole_or_not_there_and_as_others_are(tmp_path: Path) -> None:
    model = model_of("llama")
    cache = KVCache(model, "kivi-4bit:group=8")
    with torch.inference_mode():
        model(prompt(4, 200), past_key_values=cache)
    file, plain = tmp_path / "c", tmp_path / "plain"
    cache.save(file)
    plain.touch()
    assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
    before = file.read_bytes()
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))
    try:
        with pytest.raises(OSError, match="cannot save to"):
            cache.save(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.read_bytes() == before
    assert sorted(tmp_path.iterdir()) == [file, plain]
    link = tmp_path / "link"
    link.symlink_to(file)
    cache.crop(-9)
    cache.save(link)
    assert link.is_symlink() and KVCache.load(model, file).get_seq_length() == 191


def test_the_model_decides_nothing_by_its_cache(tmp_path: Path) -> None:
    """Loading leaves the model as it is for other caches."""
    model = tiny("llama")
    loaded(make_cache(model, "kivi-4bit:group=8"), tmp_path / "c")
    with torch.inference_mode():
        want = generate(tiny("llama"), DynamicCache(config=model.config), prompt())
        assert torch.equal(generate(model, DynamicCache(config=model.config), prompt()), want)
