"""Which kernel is chosen, and that it is said."""

import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from support.caches import make_cache
from support.models import prompt, tiny
from support.unusual_models import built
from xquant import KVCache, StaticKVCache
from xquant.kernels import choose
from xquant.kernels.cpu import library as native

MODEL = {"head_dim": 32, "hidden_size": 128}
CACHED = (native.loaded, native.isas, native.warn_of_absence)
needs_native = pytest.mark.skipif(not native.isas(), reason="no native library")


@needs_native
def test_the_best_that_fits_is_chosen() -> None:
    cache = KVCache(tiny("llama", **MODEL), "kivi-4bit:group=32")
    assert cache.report().kernel == native.isas()[0]


@pytest.mark.parametrize(
    ("spec", "options", "why"),
    [
        ("kivi-4bit:group=8", {}, "blocks of 8"),
        ("full:group=32", {}, "nothing is packed"),
        ("kivi-16bit:group=32", {}, "nothing is packed"),
        ("quarot-4bit:group=32,rope=pre", {}, "keys are rotated by a matrix before RoPE"),
        ("xquant-4bit:group=24", {}, "blocks of 24"),
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


@pytest.mark.parametrize(
    ("spec", "model", "why"),
    [
        ("nf5:group=32", MODEL, "a table of 32 levels"),
        ("int4-gs24:group=32", MODEL, "ranges of"),
        ("xquant-cl-2bit:group=32,first_layers=1", MODEL, "sums over layers"),
        ("kivi-4bit:group=32", {"head_dim": 20}, "heads of 20"),
        ("kivi-4bit:group=32,key_bits=16", MODEL, "keys are in no format that a kernel reads"),
        ("turboquant-3bit:group=32,qjl=true", MODEL, "keys are in no format that a kernel reads"),
    ],
)
def test_plain_torch_reads_what_the_native_kernels_do_not(spec: str, model: dict[str, int], why: str) -> None:
    cache = KVCache(tiny("llama", **model), spec)
    assert cache.report().kernel.startswith("folded") and why in cache.report().kernel


@needs_native
def test_ranked_codes_are_read_natively_in_blocks_of_any_size() -> None:
    model = tiny("llama", head_dim=24, hidden_size=128)
    for spec in (
        "tc-2bit",
        "tc-2bit:group=16",
        "tc-3bit:group=48,basis=head",
        "tc-2bit:basis=keys-first",
    ):
        assert make_cache(model, spec).report().kernel == native.isas()[0]
    cache = make_cache(model, "tc-2bit:group=32", kernel="folded")
    assert cache.report().kernel == "folded (asked for)"
    kernel = make_cache(model, "tc-cl-2bit:group=32").report().kernel
    assert kernel == "reference (keys and values are rebuilt from other states)"


def test_small_blocks_are_folded_only_when_asked_for() -> None:
    cache = KVCache(tiny("llama", **MODEL), "kivi-4bit:group=8", kernel="folded")
    assert cache.report().kernel == "folded (asked for)"


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("full:group=32", "nothing is packed"),
        ("kvquant-2bit-10%:group=32,datatype=int,scales=online", "outliers are stored apart"),
    ],
)
def test_the_folded_kernel_is_refused_what_it_cannot_read(spec: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"kernel 'folded' cannot be used: .*{why}"):
        KVCache(tiny("llama", **MODEL), spec, kernel="folded")


def test_a_kernel_that_is_none_is_refused() -> None:
    with pytest.raises(
        ValueError, match="kernel is one of auto, cuda, triton, avx512, avx2, neon, folded, reference"
    ):
        KVCache(tiny("llama"), "kivi-4bit", kernel="fast")


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """No native library, as `library_file` finds none or another file."""
    file = getattr(request, "param", None)
    monkeypatch.setattr(native, "library_file", lambda: file)
    for function in CACHED:
        function.cache_clear()
    yield
    for function in CACHED:
        function.cache_clear()


@pytest.mark.filterwarnings("ignore:xquant. attention runs")
def test_without_the_library_plain_torch_answers(absent: None) -> None:
    model = tiny("llama", **MODEL)
    for spec, kernel in (
        ("kivi-4bit:group=32", "folded"),
        ("kvquant-2bit-10%:group=32,datatype=int,scales=online", "reference"),
    ):
        cache = KVCache(model, spec)
        assert cache.report().kernel == f"{kernel} (installed without the native library)"
    cache = KVCache(model, "kivi-4bit:group=32")
    model.generate(prompt(1, 40), past_key_values=cache, max_new_tokens=3)


def warnings_of(spec: str, **options: str) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        KVCache(tiny("llama", **MODEL), spec, **options)
    return [str(each.message) for each in found if each.category is RuntimeWarning]


def test_a_machine_without_the_library_says_so_once(absent: None) -> None:
    assert warnings_of("kivi-16bit:group=32") == []  # no library would read that
    assert warnings_of("kivi-4bit:group=32", kernel="folded") == []
    (said,) = warnings_of("kivi-4bit:group=32")
    assert said == (
        "xquant: attention runs in torch, which is slower on a CPU: installed without the native library;"
        " to have it built, install GCC or Clang with OpenMP and then xquant again"
    )
    assert warnings_of("kivi-4bit:group=32") == []


@pytest.mark.parametrize(
    ("system", "machine"), [("Linux", "riscv64"), ("Darwin", "arm64"), ("Darwin", "x86_64")]
)
def test_a_machine_that_has_no_native_kernels_says_so(
    absent: None, monkeypatch: pytest.MonkeyPatch, system: str, machine: str
) -> None:
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    (said,) = warnings_of("kivi-4bit:group=32")
    assert said.endswith("a CPU: the native kernels are for Linux on x86-64 and AArch64 only")


@pytest.mark.parametrize("absent", [Path(__file__)], indirect=True)
def test_a_library_that_cannot_be_loaded_is_named(absent: None) -> None:
    (said,) = warnings_of("kivi-4bit:group=32")
    assert "the native library cannot be loaded" in said and Path(__file__).name in said


@needs_native
def test_a_machine_with_the_library_says_nothing() -> None:
    native.warn_of_absence.cache_clear()
    assert warnings_of("kivi-4bit:group=32") == []
    assert warnings_of("kivi-16bit:group=8") == []
    assert warnings_of("kivi-4bit:group=8", attend="store") == []


@needs_native
@pytest.mark.parametrize("make", [KVCache, partial(StaticKVCache, room=64)])
def test_what_no_kernel_reads_is_told_of_once(make: Callable[..., Any]) -> None:
    choose._warn.cache_clear()
    model = tiny("llama", head_dim=20, hidden_size=128)
    with pytest.warns(RuntimeWarning, match="decoding may take longer .*heads of 20") as told:
        cache = make(model, "kivi-4bit:group=32")
        make(model, "kivi-4bit:group=32")
    assert len(told) == 1
    assert "heads of 20" in cache.kernel


@needs_native
@pytest.mark.parametrize("make", [KVCache, partial(StaticKVCache, room=64)])
@pytest.mark.parametrize(
    ("family", "attention", "why"),
    [
        ("DiffLlama", "sdpa", "DiffLlamaForCausalLM works with the states that a cache returns"),
        (
            "Llama",
            "flex_attention",
            "flex_attention .attention that is given whole keys and values",
        ),
    ],
)
@pytest.mark.cases(1)
@torch.no_grad()
def test_a_layer_that_wants_whole_states_is_told_of_once(
    make: Callable[..., Any], family: str, attention: str, why: str
) -> None:
    choose._warn.cache_clear()
    model = built(family, head_dim=32)
    model.set_attn_implementation(attention)

    def told_of(method: str) -> list[str]:
        cache = make(model, method)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for count in (40, 1, 1):
                model(prompt(1, count), past_key_values=cache)
        return [str(each.message) for each in told if issubclass(each.category, RuntimeWarning)]

    assert told_of("kivi-16bit:group=32") == []
    (told,) = told_of("kivi-4bit:group=32")
    assert re.search(f"decoding may take longer .*{why}", told)
    assert told_of("kivi-4bit:group=32") == []
