import json

import pytest

from xquant.evals import runs
from xquant.evals.runs import Runs


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


@pytest.mark.parametrize("damage", ["", "{", json.dumps({"name": "other", "rows": []})])
def test_a_damaged_part_is_measured_again(tmp_path, damage):
    held = Runs(tmp_path, {})
    held.save("a", [{"n": 1}])
    (file,) = tmp_path.rglob("*.json")
    file.write_text(damage)
    assert held.load("a") is None


def test_without_a_folder_nothing_is_kept():
    held = Runs(None, {})
    held.save("a", [{"n": 1}])
    assert held.load("a") is None


def test_the_digest_is_of_this_code():
    assert len(runs.code_digest()) == 64
