"""What `auto` takes on a GPU: a backend that agrees with the reference. Here the CPU is taken for one, and
Triton's kernels run in its interpreter."""

import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", minversion="3.5")

from support import triton_interpreter
from support.attention_cases import DEVICE
from support.caches import make_cache
from support.models import prompt, tiny
from xquant import KVCache
from xquant.kernels import choose, trial
from xquant.kernels.triton import decoding, sealing
from xquant.kernels.triton.attention import TritonAttention
from xquant.quant import Affine
from xquant.quant.pack import Tile

pytestmark = pytest.mark.cases(1)

triton_interpreter.mend()

ATTEND = TritonAttention.attend


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has tried nothing yet."""
    triton_interpreter.take_for_a_gpu(monkeypatch)


def model(**options: Any) -> Any:
    return tiny("llama", head_dim=32, hidden_size=128, **options).to(DEVICE)


def kernels(spec: str, count: int = 1, of: Any = None) -> tuple[list[str], list[str]]:
    """What the reports of ``count`` caches say, and which warnings there were of kernels that were tried."""
    of = of or model()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "xquant: attention runs in torch, where")
        said = [make_cache(of, spec).report().kernel for _ in range(count)]
    return said, [str(each.message) for each in found if each.category is RuntimeWarning]


@pytest.mark.parametrize(
    "spec",
    [
        "kivi-4bit:group=32,sink=2,tail=9",
        "kivi-2bit:group=32,rope=post",
        "kvquant-3bit-1%:group=32",
        "xquant-4bit:group=32,sink=1",
        pytest.param("xquant-cl-4bit:group=32,form=gqa,sink=1", marks=pytest.mark.long),
        pytest.param("crosslayer:group=32,tail=0,km=0,vm=0,kq=2,vq=0", marks=pytest.mark.long),
        pytest.param("asymkv-1.5bit:group=32", marks=pytest.mark.long),
    ],
)
def test_a_kernel_that_agrees_is_taken(spec: str) -> None:
    assert kernels(spec) == (["triton (agrees with the reference)"], [])


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.long)])
def test_it_agrees_in_half_precision(dtype: torch.dtype) -> None:
    for spec in ("kivi-2bit:group=32", "xquant-4bit:group=32"):
        assert kernels(spec, of=model().to(dtype))[1] == []


@pytest.mark.long
def test_a_layout_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def counted(self: TritonAttention, call: Any) -> Tensor | None:
        calls.append(call)
        return ATTEND(self, call)

    monkeypatch.setattr(TritonAttention, "attend", counted)
    one = model()
    caches: list[KVCache] = []
    threads = [
        threading.Thread(target=lambda: caches.append(KVCache(one, "kivi-4bit:group=32"))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 2 and {"triton" in cache.kernel for cache in caches} == {True}
    KVCache(one, "kivi-2bit:group=32")
    assert len(calls) == 4


def wrong(self: TritonAttention, call: Any) -> Tensor | None:
    found = ATTEND(self, call)
    return None if found is None else found * 1.1


def unknown(self: TritonAttention, call: Any) -> Tensor | None:
    found = ATTEND(self, call)
    return None if found is None else found * torch.nan


def broken(self: TritonAttention, call: Any) -> Tensor | None:
    raise RuntimeError("at 7:11\nno such instruction")


def silent(self: TritonAttention, call: Any) -> Tensor | None:
    return None


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("attend", "why"),
    [
        (wrong, "triton differs from the reference by 0.1"),
        (unknown, "triton differs from the reference by nan"),
        (broken, "triton failed: RuntimeError: no such instruction"),
        (silent, "triton failed: ValueError: it has no answer"),
    ],
)
def test_one_that_does_not_agree_is_told_of_once(
    attend: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TritonAttention, "attend", attend)
    said, warned = kernels("kivi-4bit:group=32", count=2)
    assert said == [f"reference ({why})"] * 2
    (warning,) = warned
    assert warning.startswith(f"xquant: {why}, so attention runs in torch, which is slower.")
    assert "Please report" in warning and "kivi-4bit:group=32" in warning
    assert f"torch {torch.__version__}" in warning
    said, warned = kernels("kivi-2bit:group=32")  # another layout fails, too
    assert said == [f"reference ({why})"] and warned == []


def test_a_mask_that_is_read_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def unmasked(self: TritonAttention, call: Any) -> Tensor | None:
        return ATTEND(self, call._replace(mask=None))

    monkeypatch.setattr(TritonAttention, "attend", unmasked)
    ((said,), _) = kernels("kivi-4bit:group=32")
    assert said.startswith("reference (triton differs")


def test_ranked_codes_are_left_to_torch() -> None:
    said, warned = kernels("tc-2bit:group=32")
    assert said == ["reference (ranked codes, which are decoded once and multiplied by torch)"]
    assert warned == []


def test_what_is_not_read_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonAttention, "attend", broken)
    said, warned = kernels("kivi-4bit:group=24")
    assert said[0].startswith("reference (heads of 32 in blocks of 24") and warned == []
    monkeypatch.setattr(trial.Trial, "failure", lambda *_: pytest.fail("it was tried"))
    cache = KVCache(model(), "kivi-4bit:group=32", kernel="triton")
    assert cache.report().kernel == "triton (asked for)"


def test_a_trial_leaves_random_numbers_as_they_were() -> None:
    one = model()
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    assert kernels("kivi-3bit:group=32", of=one)[1] == []
    assert torch.equal(torch.rand(1), expected)


def sealed(spec: str = "kivi-4bit:group=32") -> tuple[KVCache, KVCache, list[str]]:
    """A cache of ``auto`` and one of the reference with the same sealed blocks, and which warnings there
    were."""
    one = model()
    with warnings.catch_warnings(record=True) as found, torch.no_grad():
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "xquant: attention runs in torch, where")
        # Calibrating reads blocks, too.
        caches = [make_cache(one, spec, kernel=kernel) for kernel in ("auto", "reference")]
        for cache in caches:
            for length in (70, 40):  # the second time the packer is known
                ids = prompt(2, length).to(DEVICE)
                one(ids, past_key_values=cache, use_cache=True)
    return *caches, [str(each.message) for each in found if each.category is RuntimeWarning]


def same_bytes(one: KVCache, other: KVCache) -> bool:
    pools = zip(one.compressed[0].stream.pool, other.compressed[0].stream.pool, strict=True)
    return all(
        torch.equal(ours[name].whole(), theirs[name].whole())
        for ours, theirs in pools
        for name in ours
        if name in ("codes", "scale", "zero", "gain")
    )


@pytest.mark.parametrize(
    ("spec", "asked"),
    [
        ("kivi-4bit:group=32", "pack_affine"),
        ("nf4:group=32", "pack_codebook"),
        pytest.param("tc-cl-2bit:group=32", "unpack_ranked", marks=pytest.mark.long),
    ],
)
def test_a_packer_that_agrees_is_taken(spec: str, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, calls = decoding if asked == "unpack_ranked" else sealing, 0
    usual = getattr(module, asked)

    def counted(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        return usual(*given)

    monkeypatch.setattr(module, asked, counted)
    ours, theirs, warned = sealed(spec)
    assert calls > 2 and warned == [] and same_bytes(ours, theirs)


def test_a_packer_that_does_not_agree_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, calls = sealing.pack_affine, 0

    def other(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        packed = usual(*given)
        return packed | {"scale": packed["scale"] * 1.01}

    monkeypatch.setattr(sealing, "pack_affine", other)
    ours, theirs, (warning,) = sealed()
    assert calls == 2 and same_bytes(ours, theirs)  # keys and values have a layout each
    assert warning.startswith(
        "xquant: triton packs other bytes than torch, so blocks are packed in torch, which is slower."
    )


def test_a_packer_that_cannot_run_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "unpack_ranked", lambda *_: broken(None, None))
    ours, theirs, (warning,) = sealed("tc-cl-2bit:group=32")
    assert same_bytes(ours, theirs)
    assert "triton failed: RuntimeError: no such instruction, so blocks are read in torch" in warning


def test_bad_input_is_no_failure_of_a_packer() -> None:
    packer = choose.packer_of("auto", torch.device(DEVICE))
    x = torch.randn(2, 32, 64, device=DEVICE)
    quantizer = Affine(4, "token", 32, tile=Tile(32, "tokens"))
    for _ in range(2):
        with pytest.raises(ValueError, match="NaN cannot be quantized"):
            packer.pack(quantizer, x.masked_fill(x > 1, torch.nan), None)
    packer.pack(quantizer, x, None)
    assert packer.joins(quantizer, x)
