import json

import pytest

from support.command_line import check_refused


def test_perplexity_prints_a_table_or_json_or_both(run, model, text, tmp_path):
    asked = ("perplexity", model, "--method", "kivi-4bit:group=8", "--method", "full")
    asked += ("--text", text, "--context", 40, "--windows", 2, "--device", "cpu")
    status, out, err = run(*asked, "--json", "-")
    rows = json.loads(out)
    assert (status, err) == (0, "")
    assert [row["method"] for row in rows] == ["kivi-4bit:group=8", "full"]
    assert rows[0]["tokens"] == 78
    assert (rows[0]["model"], rows[0]["text"]) == (model, "t.txt")
    status, out, err = run(*asked, "--json", tmp_path / "r.json")
    assert (status, err) == (0, "")
    assert "kivi-4bit:group=8" in out
    written = json.loads((tmp_path / "r.json").read_text())
    assert written[0]["window_nll"] == rows[0]["window_nll"]


def test_a_finished_part_of_a_run_is_not_measured_again(run, model, text, tmp_path):
    asked = ("perplexity", model, "--text", text, "--context", 40, "--windows", 2, "--json", "-")
    asked += ("--resume", tmp_path / "parts", "--method", "kivi-4bit:group=8")

    def seconds(*more):
        return [row["seconds"] for row in json.loads(run(*asked, *more)[1])]

    (first,) = seconds()
    assert seconds("--method", "int4:group=8")[0] == first != seconds("--context", 39)[0]
    assert len(list((tmp_path / "parts").iterdir())) == 2


def test_weights_in_fewer_bits_are_another_model(run, model, text, tmp_path):
    asked = ("perplexity", model, "--text", text, "--context", 40, "--windows", 2, "--json", "-")
    asked += ("--resume", tmp_path / "parts", "--method", "full", "--device", "cpu")
    rows = [json.loads(run(*asked, *more)[1])[0] for more in ((), ("--weights-bits", 4), ())]
    assert [row["weights_bits"] for row in rows] == [None, 4, None]
    assert rows[0]["window_nll"] == rows[2]["window_nll"] != rows[1]["window_nll"]


@pytest.mark.parametrize("content", ["[]", "null", '{"name": "a", "rows": [{"nll": "1"}]}'])
def test_a_part_of_a_run_that_is_something_else_is_measured_again(run, model, text, tmp_path, content):
    asked = ("perplexity", model, "--text", text, "--context", 40, "--windows", 1, "--json", "-")
    asked += ("--resume", tmp_path, "--method", "kivi-4bit:group=8")
    first = json.loads(run(*asked)[1])
    (part,) = tmp_path.rglob("kivi*.json")
    part.write_text(content)
    status, out, err = run(*asked)
    assert (status, err.count("\n")) == (0, 1)
    assert f"'{part}' is not what was written there: it is made anew" in err
    assert json.loads(out)[0]["window_nll"] == first[0]["window_nll"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("perplexity MODEL --method full", "Missing option '--text'"),
        ("perplexity MODEL --method full --text NONE", "there is no text file"),
        ("perplexity MODEL --method full --text TEXT", "past the model's 512 positions"),
        ("perplexity MODEL --method full --text TEXT --context 101", "holds 100 tokens"),
        ("perplexity MODEL --method full --text TEXT --context many", "'many' is not a valid"),
        ("compare MODEL", "Missing option '--output'"),
        ("compare MODEL --text TEXT --context 40 --output OUT", "holds 2 windows"),
        ("compare MODEL --method bad --output OUT", "unknown method 'bad'"),
        ("compare MODEL --text TEXT --output TEXT", "is not a folder"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(run, model, text, tmp_path, arguments, message):
    check_refused(run, model, text, tmp_path, arguments, message)


def test_method_and_files_are_checked_before_the_model_is_loaded(run, monkeypatch, tmp_path, text):
    monkeypatch.setattr("xquant.load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    full = ("--method", "full", "--text", text)
    for bad in (
        ("perplexity", "m", "--method", "bad", "--text", text),
        ("perplexity", "m", "--method", "full", "--text", tmp_path),
        ("perplexity", "m", *full, "--json", tmp_path / "none" / "r.json"),
        ("compare", "m", *full, "--output", text),
        ("perplexity", "m", *full, "--resume", text),
    ):
        assert run(*bad)[0] == 2


def test_specs_name_methods_of_the_laboratory(run, model, text):
    spec = "pyramid:tail=8,group=8,keep=0.25"
    asked = ("--text", text, "--context", 40, "--windows", 1, "--device", "cpu", "--json", "-")
    status, out, _ = run("perplexity", model, "--method", spec, *asked)
    (row,) = json.loads(out)
    assert (status, row["method"], row["block"]) == (0, spec, 8)
    status, out, err = run("plan", model, "--gpu", "l4", "--method", spec)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "drops tokens, and caches of xquant keep all of them" in err
