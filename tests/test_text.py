import json
import sys
import types

import pytest

from xquant.text import HELP_TOPICS, read_text, text_name


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a"])
def test_a_plain_file_is_read_whole(tmp_path, name):
    (tmp_path / name).write_text("eins\n\nzwei ä\n", encoding="utf-8")
    assert read_text(tmp_path / name) == "eins\n\nzwei ä\n"
    assert text_name(str(tmp_path / name)) == name


def test_rows_of_a_raw_file_are_joined_by_blank_lines(tmp_path):
    (tmp_path / "a.raw").write_text(" = One = \n two")
    assert read_text(tmp_path / "a.raw") == " = One = \n\n\n two\n"


def test_jsonl_fields_are_joined_by_blank_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [{"text": "one"}, {"text": "two\u2028three", "id": 7}]
    path.write_text("\n".join(json.dumps(r, ensure_ascii=False) for r in rows) + "\n\n")
    assert read_text(path) == "one\n\ntwo\u2028three"


def test_help_topics_is_long_and_the_same_every_time():
    text = read_text(HELP_TOPICS)
    assert len(text) > 100_000
    assert text == read_text(HELP_TOPICS)
    assert text_name(HELP_TOPICS) == HELP_TOPICS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b" \n", "holds no text"),
        ("a.txt", b"\xff\xfe\x00", "not UTF-8"),
        ("a.jsonl", b'{"text": "x"}\n{"text"', "line 2: not JSON"),
        ("a.jsonl", b'{"text": 3}', "line 1"),
        ("a.jsonl", b"[1]", "line 1"),
        ("a.jsonl", b"\n", "holds no text"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        read_text(tmp_path / name)
    assert "\n" not in str(error.value)


def test_a_missing_file_and_a_folder_are_told_apart(tmp_path):
    with pytest.raises(FileNotFoundError, match="no text file"):
        read_text(tmp_path / "none.txt")
    with pytest.raises(ValueError, match="is a folder"):
        read_text(tmp_path)


def test_data_sets_of_the_hub_are_read_as_the_papers_do(monkeypatch):
    class Rows(list):
        """As a data set: a column by name, or columns of some rows."""

        def __getitem__(self, what):
            return list(self) if what == "text" else {"text": list(self)[what]}

    datasets, asked = types.ModuleType("datasets"), []

    def load(*arguments, **_):
        asked.append(arguments[0])
        return Rows(["", " = A = \n", "one\n"] * (1000 if "c4" in arguments[0] else 1))

    datasets.load_dataset = load
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    assert read_text("wikitext2") == "\n\n = A = \n\n\none\n"
    assert read_text("c4").count("one") == 366
    assert asked == ["Salesforce/wikitext", "allenai/c4"]


def test_a_hub_that_is_not_there_is_told_in_one_line(monkeypatch):
    datasets = types.ModuleType("datasets")

    def load(*_, **__):
        raise ConnectionError("no route\nto host")

    datasets.load_dataset = load
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    with pytest.raises(FileNotFoundError, match=r"'c4' could not .*no route\): give a file"):
        read_text("c4")
