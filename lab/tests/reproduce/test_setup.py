from dataclasses import replace

import pytest

from support.models import tiny
from support.word_tokenizer import text_of, word_tokenizer
from xquant import parse_method
from xquant_lab.reproduce import setup as module
from xquant_lab.reproduce.setup import Setup

METHODS = [parse_method(spec) for spec in ("kvquant-2bit", "kivi-2bit", "kvquant-2bit:tail=4")]


def make(**more):
    size = {"context": 24, "windows": 1, "calibration_windows": 2}
    return Setup(tiny("llama"), word_tokenizer(), text_of(60), **size, **more)


def test_methods_that_need_it_are_calibrated_once_on_the_text_given():
    setup = make(calibration_text=text_of(50), calibration_name="t.txt")
    (made,) = setup.calibrated(METHODS)
    assert made.method == "kvquant-2bit"
    assert made.text.startswith("t.txt,")
    assert list(setup.calibrated(METHODS)) == [made]


def test_without_a_text_the_model_writes_one():
    (made,) = make().calibrated(METHODS)
    assert made.text.startswith("generated")
    assert made.text.endswith(" 48 tokens")


def test_a_calibration_at_hand_is_used(monkeypatch):
    given = make().calibrated(METHODS)
    monkeypatch.setattr(module, "calibrate_together", None)
    assert make(calibrations=given).calibrated(METHODS).of(METHODS[0]) == given.of(METHODS[0])


def test_what_is_finished_is_found_again(tmp_path, monkeypatch):
    specs = [method.spec for method in METHODS]
    first = make(resume=tmp_path).perplexity(specs)
    monkeypatch.setattr(module, "calibrate_together", None)
    again = make(resume=tmp_path)
    monkeypatch.setattr(type(again.model), "forward", None)
    assert again.perplexity(specs) == first


@pytest.mark.parametrize("damage", ["cut", "other tensors"])
def test_a_damaged_calibration_is_made_anew(tmp_path, capsys, damage):
    (made,) = make(resume=tmp_path).calibrated(METHODS)
    (file,) = tmp_path.iterdir()
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        replace(made, tensors={}).save(file)
    assert list(make(resume=tmp_path).calibrated(METHODS)) == [made]
    assert capsys.readouterr().err == (f"xquant: '{file}' is not what was written there: it is made anew\n")
    assert list(make(resume=tmp_path).calibrated(METHODS)) == [made]
    assert capsys.readouterr().err == ""


def test_another_calibration_text_is_another_calibration(tmp_path):
    texts = (text_of(50), "w9 " + text_of(50))
    one, other = (
        make(resume=tmp_path, calibration_text=text).calibrated(METHODS).of(METHODS[0]) for text in texts
    )
    assert len(list(tmp_path.iterdir())) == 2
    assert one != other


def test_a_text_too_short_is_refused_before_the_calibration(monkeypatch):
    monkeypatch.setattr(module, "calibrate_together", None)
    with pytest.raises(ValueError, match="one window needs 24"):
        Setup(tiny("llama"), word_tokenizer(), text_of(9), context=24).perplexity(["kvquant-2bit"])


def test_methods_calibrated_together_get_what_they_get_alone(monkeypatch):
    specs = ["kvquant-2bit:scales=offline", "kvquant-3bit-5%", "tc-2bit", "kvquant-2bit:rope=post"]
    methods = [parse_method(spec) for spec in specs]
    monkeypatch.setattr(module, "TOGETHER", 3)
    together = make().calibrated(methods)
    for method in methods:
        alone = make().calibrated([method]).of(method)
        own = together.of(method)
        assert own.tensors.keys() == alone.tensors.keys()
        for name, tensor in own.tensors.items():
            assert tensor.equal(alone.tensors[name])
