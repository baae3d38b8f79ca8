import json
import os

import pytest

from support.result_rows import benched, compared, scored

SMALL = ("--context", 40, "--windows", 2, "--device", "cpu")


@pytest.fixture
def files(tmp_path):
    """Results files by name, as other runs would have left them, and some that are none."""
    content = {
        "bench": [benched("full", 512, 1.0), benched("kivi-4bit", 512, 1.2)],
        "bench2": [
            benched("kivi-4bit", 1024, 1.7),
            {**benched("kivi-2bit", 1024, 1.0), "ms_per_token": None, "speedup_vs_full": None},
        ],
        "tasks": [scored("kivi-4bit", "gsm8k", 0.25)],
        "old": [{k: v for k, v in compared("full", 1.0, 1.0).items() if k != "schema"}],
        "newer": [compared("full", 1.0, 1.0, schema=2)],
        "object": {"method": "full"},
        "empty": [],
    }
    folder = tmp_path / "files"
    folder.mkdir()
    for name, rows in content.items():
        (folder / f"{name}.json").write_text(json.dumps(rows))
    (folder / "text.json").write_text("not JSON")
    (folder / "binary.json").write_bytes(b"\xff\xfe\x00")
    return folder


def test_results_of_other_verbs_are_shown_on_the_page(run, model, text, files, tmp_path):
    out_folder = tmp_path / "out"
    status, _, err = run(
        "compare", model, "--method", "kivi-4bit:group=8", "--text", text, *SMALL, "--output", out_folder,
        "--bench", files / "bench.json", "--bench", files / "bench2.json", "--eval", files / "tasks.json",
    )  # fmt: skip
    assert (status, err) == (0, "")
    pictures = {f"{name}.{form}" for name in ("perplexity", "speed") for form in ("svg", "png")}
    assert set(os.listdir(out_folder)) == {"results.json", "report.html", *pictures}
    page = (out_folder / "report.html").read_text()
    assert all(said in page for said in ("<h2>Speed</h2>", "1,024 tokens", "gsm8k", "<h2>Tasks"))


@pytest.mark.long
def test_a_run_is_compared_with_an_earlier_one(run, model, text, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    asked = ("compare", model, "--text", text, *SMALL)
    methods = ("--method", "kivi-4bit:group=8", "--method", "int4")
    assert run(*asked, *methods, "--output", first)[0] == 0
    results = first / "results.json"
    status, out, err = run(*asked, *methods[:2], "--against", results, "--output", second)
    assert (status, err) == (0, "")
    table = out[out.index("Against") :]
    assert "kivi-4bit:group=8" in table and "int4" not in table
    assert "+0.0000" in table and "0.0000" in table.replace("+0.0000", "")
    assert "None changed by more than" in (second / "report.html").read_text()
    # Fewer windows are other windows: the difference has no error.
    shorter = (*asked[:4], "--context", 40, "--windows", 1, "--device", "cpu")
    status, out, err = run(*shorter, *methods[:2], "--against", results, "--output", second)
    assert (status, err) == (0, "")
    assert "There are no standard errors" in (second / "report.html").read_text()
    # Standard output is for the rows alone where they are written to it.
    status, out, err = run(*asked, *methods[:2], "--against", results, "--output", second, "--json", "-")
    assert (status, [row["schema"] for row in json.loads(out)]) == (0, [1, 1])


@pytest.mark.parametrize(
    ("option", "file", "message"),
    [
        ("--against", "old", "was written before rows had a schema number: measure again"),
        ("--against", "newer", "is of schema 2, and this xquant reads 1"),
        ("--against", "bench", "holds results of another kind: a row has no 'perplexity'"),
        ("--against", "object", "is not a results file: it holds no JSON array of rows"),
        ("--against", "empty", "is not a results file: it holds no JSON array of rows"),
        ("--against", "text", "is not a results file: it holds no JSON"),
        ("--against", "binary", "is not a results file: it holds no JSON"),
        ("--against", "none", "does not exist"),
        ("--bench", "tasks", "holds results of another kind: a row has no 'measured'"),
        ("--eval", "bench", "holds results of another kind: a row has no 'task'"),
    ],
)
def test_a_file_that_is_none_is_refused_in_one_line_before_the_model_is_loaded(
    run, monkeypatch, text, files, tmp_path, option, file, message
):
    monkeypatch.setattr("xquant.load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    path, output = files / f"{file}.json", tmp_path / "out"
    status, out, err = run("compare", "m", "--text", text, option, path, "--output", output)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err and str(path) in err
    assert not output.exists()


def test_compare_writes_its_four_files(run, model, text, tmp_path):
    folder = tmp_path / "new" / "out"
    status, out, err = run(
        "compare", model, "--method", "kivi-4bit:group=8", "--text", text, "--context", 40,
        "--windows", 1, "--output", folder,
    )  # fmt: skip
    assert (status, err) == (0, "")
    files = {"results.json", "report.html", "perplexity.svg", "perplexity.png"}
    assert set(os.listdir(folder)) == files
    rows = json.loads((folder / "results.json").read_text())
    assert [row["method"] for row in rows] == ["full", "kivi-4bit:group=8"]
    assert out.index("full") < out.index("kivi-4bit")
    assert "kivi-4bit:group=8: KL" in out or "half of the places" in out
