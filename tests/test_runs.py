import json
import math
import sys
from importlib import import_module

import pytest

from support.models import tiny
from xquant import runs
from xquant.runs import Runs, identity


def test_parts_are_found_by_the_same_run_only(tmp_path, monkeypatch):
    one, rows = Runs(tmp_path, {"model": "m", "context": 8}), [{"nll": 1.5, "method": "kivi-2bit"}]
    assert one.load("a") is None
    one.save("a", rows)
    again = Runs(tmp_path, {"context": 8, "model": "m"})
    assert again.load("a") == rows and again.load("b") is None
    assert Runs(tmp_path, {"model": "m", "context": 9}).load("a") is None
    monkeypatch.setattr(runs, "code_digest", lambda: "edited")
    assert Runs(tmp_path, {"model": "m", "context": 8}).load("a") is None


def test_names_that_look_alike_in_a_file_system_are_different_parts(tmp_path):
    held = Runs(tmp_path, {})
    held.save("kivi-2bit:sink=1", [{"n": 1}])
    held.save("kivi-2bit/sink=1", [{"n": 2}])
    assert held.load("kivi-2bit:sink=1") == [{"n": 1}]


ROWS = [{"n": 1, "answers": ["a", None, True], "nll": math.nan}]


def kept(**changes):
    """A part as it is written, with other facts."""

    def damaged(part):
        return json.dumps({**part, **changes})

    return damaged


@pytest.mark.parametrize(
    "damage",
    [
        *(lambda part, text=text: text for text in ("", "{", "[]", "null", '"a"', "7", "{}")),
        lambda part: "[" * 100_000,
        lambda part: json.dumps([part]),
        lambda part: json.dumps({k: v for k, v in part.items() if k != "sha256"}),
        lambda part: json.dumps({k: v for k, v in part.items() if k != "rows"}),
        *(kept(rows=rows) for rows in (None, [], {}, "rows", 3, [None], [[]], [{}], [{"n": "1"}])),
        kept(rows=[{**ROWS[0], "answers": ["b", None, True]}]),
        kept(sha256=None),
    ],
)
def test_a_part_that_was_not_written_so_is_measured_again(tmp_path, capsys, damage):
    held = Runs(tmp_path, {"windows": (1, 2)})
    held.save("a", ROWS)
    assert str(held.load("a")) == str(ROWS)
    (file,) = tmp_path.rglob("*.json")
    whole = json.loads(file.read_text())
    file.write_text(damage(whole))
    assert capsys.readouterr().err == ""
    assert held.load("a") is None
    assert capsys.readouterr().err == (f"xquant: '{file}' is not what was written there: it is made anew\n")
    held.save("a", ROWS)
    assert json.loads(file.read_text())["sha256"] == whole["sha256"]


def test_a_part_is_not_taken_for_another(tmp_path):
    held = Runs(tmp_path, {})
    held.save("a", ROWS)
    held.save("b", ROWS)
    one, other = tmp_path.rglob("*.json")
    one.write_text(other.read_text())
    assert [held.load(name) is None for name in ("a", "b")].count(True) == 1


def test_without_a_folder_nothing_is_kept():
    held = Runs(None, {})
    held.save("a", [{"n": 1}])
    assert held.load("a") is None


def test_the_digest_is_of_this_code_and_this_library(tmp_path, monkeypatch):
    assert len(runs.code_digest()) == 64
    digests = {runs.code_digest()}
    for content in (b"one", b"two"):
        (tmp_path / "library.so").write_bytes(content)
        monkeypatch.setenv("XQUANT_NATIVE_LIBRARY", str(tmp_path / "library.so"))
        digests.add(runs.code_digest())
    monkeypatch.setenv("XQUANT_NATIVE_LIBRARY", str(tmp_path / "none.so"))
    digests.add(runs.code_digest())
    assert len(digests) == 4


def test_the_digest_is_of_a_package_that_is_loaded_later(tmp_path, monkeypatch):
    before = runs.code_digest()
    (tmp_path / "xquant_later").mkdir()
    file = tmp_path / "xquant_later" / "__init__.py"
    file.touch()
    monkeypatch.syspath_prepend(tmp_path)
    import_module("xquant_later")
    try:
        loaded = runs.code_digest()
        assert loaded != before
        file.write_text("edited = True\n")
        assert runs.code_digest() == loaded  # what runs is what was loaded
    finally:
        del sys.modules["xquant_later"]
    assert runs.code_digest() == before


def test_results_of_other_weights_are_not_found():
    model = tiny("llama")
    before = identity(model, "", [])
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] += 1
    assert identity(model, "", []) != before == identity(tiny("llama"), "", [])
