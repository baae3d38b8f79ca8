"""What is no saved cache of this model is refused by one line, and nothing comes of it."""

import json
import os
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from support.caches import calibration, make_cache
from support.damaged_files import fact_changes, outcome, read, tensor_changes, write
from support.models import prompt, tiny
from support.unusual_models import SWITCH, long_rope
from xquant import Calibration, KVCache
from xquant.methods import xquant
from xquant.quant import Codebook

SPEC = "kivi-2bit:group=8,sink=2"
ROOM = 1 << 29
"""Bytes that loading a broken file of some kilobytes may not ask for."""


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama", num_hidden_layers=2)


def filled(model: Any, spec: str, length: int = 37) -> KVCache:
    cache = make_cache(model, spec)
    with torch.inference_mode():
        model(prompt(2, length), past_key_values=cache)
        cache.batch_repeat_interleave(2)
        model(prompt(4, 1), past_key_values=cache)
    return cache


@pytest.fixture
def file(model: Any, tmp_path: Path) -> Path:
    filled(model, SPEC).save(tmp_path / "c", prompt(4, 38))
    return tmp_path / "c"


def refused(model: Any, file: Path, words: str, **more: Any) -> None:
    with pytest.raises(ValueError, match=words) as error:
        KVCache.load(model, file, **more)
    assert "\n" not in str(error.value) and str(file) in str(error.value)


# -- another model, another calibration --------------------------------------------------------------


def test_another_model_is_refused(model: Any, file: Path) -> None:
    refused(tiny("llama"), file, "saved from another model")
    refused(tiny("qwen2", num_hidden_layers=2), file, r"another model \(LlamaForCausalLM\)")
    refused(tiny("llama", num_hidden_layers=2).double(), file, "in float32, and this one is in float64")
    other = tiny("llama", num_hidden_layers=2)
    assert KVCache.load(other, file).get_seq_length() == 38
    other.model.layers[1].self_attn.v_proj.weight.data[0, 0] += 1
    refused(other, file, "saved from another model")
    with pytest.raises(TypeError, match="a transformers model is needed, not PosixPath"):
        KVCache.load(file, model)


def test_a_cache_that_holds_tokens_while_the_model_changes_is_of_the_new_one(
    tmp_path: Path,
) -> None:
    """What is saved names the model that it is saved with."""
    model = tiny("llama", num_hidden_layers=2)
    cache = filled(model, SPEC)
    model.model.layers[1].self_attn.v_proj.weight.data[0, 0] += 1
    cache.save(tmp_path / "c")
    refused(tiny("llama", num_hidden_layers=2), tmp_path / "c", "saved from another model")


@pytest.mark.parametrize("spec", ["tc-2bit:group=16", "kvquant-2bit-1%:group=8"])
def test_another_calibration_is_refused(model: Any, spec: str, tmp_path: Path) -> None:
    filled(model, spec).save(tmp_path / "c")
    made = calibration(model, spec)
    assert made is not None
    made.save(tmp_path / "made")
    assert KVCache.load(model, tmp_path / "c", tmp_path / "made").get_seq_length() == 38
    other = replace(made, text="another text")
    assert isinstance(other, Calibration)
    refused(model, tmp_path / "c", "packed with another calibration", calibration=other)
    with pytest.raises(ValueError, match="needs a calibration"):
        KVCache.load(model, tmp_path / "c")


def test_a_calibration_that_is_kept_is_found(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from xquant import calibration_store

    monkeypatch.setenv("XQUANT_CACHE", str(tmp_path))
    other, spec = tiny("llama", num_hidden_layers=2), "tc-2bit:group=16"
    made = calibration(model, spec)
    assert made is not None
    filled(model, spec).save(tmp_path / "c")
    calibration_store.keep(made)
    assert KVCache.load(other, tmp_path / "c").get_seq_length() == 38
    calibration_store.keep(replace(made, text="another text"))
    refused(tiny("llama", num_hidden_layers=2), tmp_path / "c", "packed with another calibration")


@pytest.mark.parametrize("form", ["gqa", "mha"])
def test_other_bases_are_refused(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library of linear algebra that gives other vectors of an SVD."""
    spec = f"xquant-4bit:group=8,form={form}"
    filled(tiny("llama", num_hidden_layers=2), spec).save(tmp_path / "c")
    usual = xquant.left_basis

    def other(weight: torch.Tensor) -> Any:
        basis, rest = usual(weight)
        signs = torch.ones(len(basis))
        signs[3] = -1
        return basis * signs[:, None], rest * signs

    monkeypatch.setattr(xquant, "left_basis", other)
    fresh = tiny("llama", num_hidden_layers=2)
    if form == "gqa":
        refused(fresh, tmp_path / "c", "packed in other bases")
    else:
        assert KVCache.load(fresh, tmp_path / "c").get_seq_length() == 38


# -- files that are none -------------------------------------------------------------------------------


def test_what_is_no_saved_cache_is_refused(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "c"
    with pytest.raises(FileNotFoundError, match=re.escape(f"there is no saved cache '{path}'")):
        KVCache.load(model, path)
    refused(model, tmp_path, "is not a file")
    for content in (
        b"",
        b"x",
        b"a text " * 99,
        bytes(8),
        (2**63).to_bytes(8, "little") + bytes(99),
    ):
        path.write_bytes(content)
        refused(model, path, "is damaged or no saved cache")
    save_file({"a": torch.zeros(3)}, path)
    refused(model, path, "is a safetensors file, but not a saved cache of xquant")
    made = calibration(model, "tc-2bit:group=16")
    assert made is not None
    made.save(path)
    refused(model, path, "is a safetensors file, but not a saved cache of xquant")


def test_another_major_version_is_refused_and_a_minor_one_is_not(model: Any, file: Path) -> None:
    facts, tensors = read(file)
    write(file, {**facts, "version": "3.0"}, tensors)
    refused(model, file, r"of format 3\.0, and this xquant reads 4\.x")
    write(file, {**facts, "version": "4.9", "more": [1]}, tensors)
    assert KVCache.load(model, file).get_seq_length() == 38


def test_a_target_that_cannot_be_written(model: Any, tmp_path: Path) -> None:
    cache = filled(model, SPEC)
    with pytest.raises(FileNotFoundError, match=r"cannot save to '.*': there is no folder"):
        cache.save(tmp_path / "no" / "c")
    with pytest.raises(ValueError, match="it is not a file"):
        cache.save(tmp_path)
    with pytest.raises(ValueError, match="it is not a file"):
        cache.save("/dev/null")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "tokens",
    [
        prompt(4, 37),
        prompt(1, 38),
        prompt(4, 38).float(),
        prompt(4, 38) > 3,
        -prompt(4, 38),
        prompt(4, 38) + 2**31,
    ],
)
def test_ids_of_other_tokens_are_refused(model: Any, tmp_path: Path, tokens: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"tokens are|id of a token"):
        filled(model, SPEC).save(tmp_path / "c", tokens)
    assert not list(tmp_path.iterdir())


def test_layers_of_which_more_may_matter_are_refused(model: Any, tmp_path: Path) -> None:
    gemma = tiny("gemma3")
    cache = filled(gemma, SPEC)
    kind = type("OtherLayer", (type(cache.layers[0]),), {})
    cache.layers[0].__class__ = kind
    with pytest.raises(ValueError, match="keeps layer 0 in a OtherLayer"):
        cache.save(tmp_path / "c")


def test_a_quantizer_that_could_not_be_read_back_is_refused(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = filled(model, "kvquant-2bit-1%:group=8")
    monkeypatch.setattr(Codebook, "ragged", {})
    with pytest.raises(ValueError, match=r"Codebook\.ragged does not name 'outlier_excess'"):
        cache.save(tmp_path / "c")


# -- damage ----------------------------------------------------------------------------------------------

WIDE: dict[str, Any] = {"num_hidden_layers": 2, "head_dim": 32}
MIXED: dict[str, Any] = {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
}
CODED = "coded"
KINDS: dict[str, tuple[Callable[[], Any], str, int]] = {
    CODED: (lambda: tiny("llama", **WIDE), "tc-2bit:group=32,sink=2", 75),
    "native": (lambda: tiny("llama", **WIDE), "kivi-4bit:group=32,sink=1", 75),
    "outliers": (lambda: tiny("llama", **WIDE), "kvquant-3bit-5%:group=32", 75),
    "ranked": (lambda: tiny("llama", **WIDE), "tc-cl-1.5bit:group=32", 75),
    "windows": (lambda: tiny("gemma3", **MIXED), SPEC, 37),
    "shared": (lambda: tiny("llama"), "crosslayer:group=8,tail=0,km=0,vm=0,kq=2,vq=0", 37),
    "long": (long_rope, "kivi-2bit:group=8", SWITCH + 3),
}
EVERY = "XQUANT_EXAMPLES" in os.environ


@pytest.fixture(scope="module", params=KINDS)
def kind(request: Any, tmp_path_factory: Any) -> tuple[int, Any, Path]:
    """The number of a kind, what loads a file of it and goes on, and a file."""
    make, spec, length = KINDS[request.param]
    number = list(KINDS).index(request.param)
    model = make()
    file = tmp_path_factory.mktemp("saved") / "c"
    pack = "entropy" if request.param == CODED else None
    filled(model, spec, length).save(file, prompt(4, length + 1), pack)
    return number, partial(use, model, calibration(model, spec)), file


@torch.inference_mode()
def use(model: Any, made: Any, file: Path) -> None:
    """Load a file, and go on with a step and a chunk; a block is sealed."""
    cache = KVCache.load(model, file, made)
    for ids in (prompt(4, 1), prompt(4, 20)):
        batch = cache.index.batch or 4
        model(ids[:1].expand(batch, -1), past_key_values=cache)


@pytest.fixture(scope="module", autouse=True)
def little_memory() -> Iterator[None]:
    """What asks for much memory fails."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    now = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmSize" in line)
    resource.setrlimit(resource.RLIMIT_AS, ((int(now.split()[1]) << 10) + ROOM, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_any_byte_that_is_another_is_found(kind: Any, tmp_path: Path) -> None:
    _, load, file = kind
    content, draw, changed = file.read_bytes(), random.Random(0), tmp_path / "c"
    header = 8 + int.from_bytes(content[:8], "little")
    ends = [0, 7, 8, 9, header // 2, header - 1, header, header + 1, len(content) - 1]
    cases = [content[:end] for end in [*ends, *(draw.randrange(len(content)) for _ in range(10))]]
    cases += [content + b"\0", content[:header] + content[header + 1 :] + b"\0"]
    for number in range(60):
        other = bytearray(content)
        for _ in range(draw.choice((1, 1, 3))):
            at = draw.randrange(header if number % 3 == 0 else len(content))
            other[at] = draw.choice([byte for byte in range(256) if byte != content[at]])
        cases.append(bytes(other))
    blank = content.rindex(b" ", 0, header) if content[header - 1 : header] == b" " else None
    if blank is not None:
        cases.append(content[:blank] + b"\t" + content[blank + 1 :])
    for number, case in enumerate(cases):
        changed.write_bytes(case)
        assert outcome(partial(load, changed)) == "refused", number


MAY_BE = re.compile(
    r"(xquant|transformers|family|attention|cache_bytes|full_cache_bytes) is |attend is store"
    r"|tokens removed"
    r"|version is 4\.9|recording is \[|.*(codes|scale|zero|gain|tail|sinks|keys|values|excess|ids).* of zeros"
    r"|.*(codes|scale|gain).* (of the|one more|turned)"
    r"|(positions|real|tokens|table|.*channel).* (of |one|not)"
)
"""What another cache may be: of other numbers, or what nothing asks about."""


@pytest.mark.cases(2)
def test_a_header_or_a_shape_that_is_another_is_refused(kind: Any, tmp_path: Path) -> None:
    number, load, file = kind
    facts, tensors = read(file)
    changed, wrong = tmp_path / "c", []
    cases = [(change, other, tensors) for change, other in fact_changes(facts)]
    cases += [(change, facts, others) for change, others in tensor_changes(tensors)]
    for change, told, held in cases if EVERY else cases[number % 4 :: 4]:
        write(changed, told, held)
        found = outcome(partial(load, changed))
        if found != "refused" and not (found == "used" and MAY_BE.match(change)):
            wrong.append((change, found))
    assert not wrong


def test_checksums_alone_are_not_enough(file: Path, model: Any) -> None:
    """A header that names other tensors than there are."""
    facts, tensors = read(file)
    text = json.dumps({**facts, "checksums": {**facts["checksums"], "more": "0" * 64}})
    write(file, text, tensors)
    refused(model, file, "holds other tensors than its header names")
