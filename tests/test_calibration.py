"""The artifact: whole or not at all, and only for what it was made for."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from support.models import prompt, tiny
from xquant import Calibration, KVCache, attach
from xquant.calibrators.run import calibrate_on
from xquant.codecs import fingerprint
from xquant.methods import Full

SPEC = "kvquant-2bit-1%"


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama")


@pytest.fixture(scope="module")
def made(model: Any) -> Calibration:
    return calibrate_on(model, prompt(2, 40), SPEC + ":tail=4", "random")


def test_what_was_saved_is_loaded(made: Calibration, tmp_path: Path) -> None:
    made.save(tmp_path / "c.safetensors")
    again = Calibration.load(tmp_path / "c.safetensors")
    assert (again.method, again.model, again.text, again.version) == (
        made.method, made.model, made.text, made.version,
    )  # fmt: skip
    assert again.method == SPEC  # tail does not matter to it
    assert again.text.startswith("random, sha256 ") and again.text.endswith(", 80 tokens")
    assert all(torch.equal(t, again.tensors[name]) for name, t in made.tensors.items())
    assert again == made and hash(again) == hash(made)
    first = next(iter(made.tensors))
    changed = {**made.tensors, first: made.tensors[first] + 1}
    assert replace(made, tensors=changed) != made
    assert list(tmp_path.iterdir()) == [tmp_path / "c.safetensors"]


def test_a_cache_takes_the_object_or_its_file(model: Any, made: Calibration, tmp_path: Path) -> None:
    made.save(tmp_path / "c.safetensors")
    ids = prompt(1, 40)
    with torch.inference_mode():
        logits = [
            model(
                ids,
                past_key_values=KVCache(model, SPEC + ":group=8", attend="store", calibration=given),
                use_cache=True,
            ).logits
            for given in (made, tmp_path / "c.safetensors", str(tmp_path / "c.safetensors"))
        ]
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])
    attachment = attach(model)
    held = len(attachment.codecs._kept)
    KVCache(model, SPEC + ":group=8", calibration=tmp_path / "c.safetensors")
    assert len(attachment.codecs._kept) == held  # reading the file again builds nothing again


def test_the_same_model_in_bf16_takes_it(made: Calibration) -> None:
    other = tiny("llama").bfloat16()
    rounded = other.float()
    assert fingerprint(attach(other).view.compressed) == made.model
    KVCache(rounded, SPEC, calibration=made)


def test_it_is_refused_for_anything_else(model: Any, made: Calibration) -> None:
    with pytest.raises(ValueError, match="kvquant-2bit-1% needs a calibration: 'xquant calibrate"):
        KVCache(model, SPEC)
    with pytest.raises(ValueError, match="is for kvquant-2bit-1%, not for kvquant-3bit-1%"):
        KVCache(model, "kvquant-3bit-1%", calibration=made)
    with pytest.raises(ValueError, match="is for kvquant-2bit-1%, not for kvquant-2bit-1%:sink=2"):
        KVCache(model, SPEC + ":sink=2", calibration=made)
    with pytest.raises(ValueError, match="not for kivi-2bit"):
        KVCache(model, "kivi-2bit", calibration=made)
    other = tiny("llama")
    with torch.no_grad():
        other.model.layers[3].self_attn.v_proj.weight[0, 0] += 1
    with pytest.raises(ValueError, match="made on another model"):
        KVCache(other, SPEC, calibration=made)
    KVCache(model, SPEC, calibration=made)


def test_models_that_differ_in_their_key_norms_alone_are_others() -> None:
    normed, plain = tiny("gemma3"), tiny("gemma2")
    for one, other in zip(attach(normed).view.layers, attach(plain).view.layers, strict=True):
        assert torch.equal(one.key_weight, other.key_weight)
        assert torch.equal(one.value_weight, other.value_weight)
    made = calibrate_on(normed, prompt(2, 40), SPEC)
    with pytest.raises(ValueError, match="made on another model"):
        KVCache(plain, SPEC, calibration=made)
    KVCache(normed, SPEC, calibration=made)
    with torch.no_grad():
        normed.model.layers[3].self_attn.k_norm.weight[0] += 1
    with pytest.raises(ValueError, match="made on another model"):
        KVCache(normed, SPEC, calibration=made)


def test_bad_files_are_told_in_one_line(made: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    with pytest.raises(FileNotFoundError, match="there is no calibration file"):
        Calibration.load(path)
    with pytest.raises(ValueError, match="is a folder"):
        Calibration.load(tmp_path)
    made.save(path)
    whole = path.read_bytes()
    for part in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:part])
        with pytest.raises(ValueError, match="damaged or no calibration file"):
            Calibration.load(path)
    path.write_text("not an artifact at all")
    with pytest.raises(ValueError, match="damaged or no calibration file"):
        Calibration.load(path)
    save_file({"weight": torch.ones(2)}, path)
    with pytest.raises(ValueError, match="not a calibration of xquant"):
        Calibration.load(path)
    facts = {"kind": "xquant calibration", "method": SPEC, "model": made.model, "text": made.text}
    save_file(made.tensors, path, {**facts, "version": "9.0.0"})
    with pytest.raises(ValueError, match=r"written by xquant 9\.0\.0, this is"):
        Calibration.load(path)
    save_file({"0.key.levels": torch.ones(4)}, path, {**facts, "version": made.version})
    with pytest.raises(ValueError, match="lacks"):
        KVCache(tiny("llama"), SPEC, calibration=path)


def test_a_failing_save_leaves_what_was_there(made: Calibration, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    with pytest.raises(OSError):
        made.save(tmp_path / "none" / "c.safetensors")
    assert list(tmp_path.iterdir()) == [tmp_path / "c"]


def test_methods_without_statistics_have_nothing_to_calibrate(model: Any) -> None:
    for spec in ("kivi-2bit", "kvquant-16bit", "kvquant-3bit-1%:datatype=nf,scales=online"):
        with pytest.raises(ValueError, match="needs no calibration"):
            calibrate_on(model, prompt(2, 40), spec)
    with pytest.raises(ValueError, match="nothing but sinks"):
        calibrate_on(model, prompt(2, 4), "kvquant-2bit:sink=4")
    with pytest.raises(ValueError, match="too short"):
        calibrate_on(model, prompt(1, 2), "kvquant-4bit")


def test_a_method_that_no_calibrator_is_registered_for_is_told_of(model: Any) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Unknown(Full):
        needs_calibration = True

    with pytest.raises(ValueError, match="no calibrator is registered"):
        calibrate_on(model, prompt(2, 40), Unknown())
