import json
import os

import pytest

from xquant.files import write_atomically
from xquant.results import environment, stamp, write_json


def test_rows_are_self_contained_and_valid_json(tmp_path):
    rows = stamp([{"perplexity": float("inf")}, {"perplexity": 2.0}], model="m", text="t")
    write_json(tmp_path / "r.json", rows)
    read = json.loads((tmp_path / "r.json").read_text(), parse_constant=pytest.fail)
    assert [row["perplexity"] for row in read] == [None, 2.0]
    for row in read:
        assert (row["model"], row["text"]) == ("m", "t")
        assert {"command", "xquant", "torch", "transformers", "python"} <= row["environment"].keys()
    assert os.listdir(tmp_path) == ["r.json"]


def test_a_dash_is_standard_output(capsys):
    write_json("-", [{"a": 1}])
    assert json.loads(capsys.readouterr().out) == [{"a": 1}]


def test_environment_is_of_plain_values():
    assert json.loads(json.dumps(environment())) == environment()


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    path.write_text("old")
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["r.json"]


def test_a_link_is_followed_and_a_device_stays_one(tmp_path):
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    write_atomically(tmp_path / "link.json", "new")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").read_text() == "new"
    write_atomically(os.devnull, "gone")
    assert not os.path.isfile(os.devnull)
