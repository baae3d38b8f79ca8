import json

import pytest

from xquant_lab.bench import run as bench
from xquant_lab.verbs import bench_report
from xquant_lab.verbs.bench_report import Report


def test_bench_prints_a_table_or_json(run, model):
    asked = ("bench", model, "--method", "kivi-4bit:group=8", "--context", 20, "--rounds", 1)
    asked += ("--device", "cpu")
    status, out, err = run(*asked, "--json", "-")
    rows = json.loads(out)
    assert (status, err) == (0, "")
    assert [row["method"] for row in rows] == ["full", "kivi-4bit:group=8"]
    assert rows[0]["model"] == model and rows[0]["environment"]["threads"] >= 1
    status, out, err = run(*asked)
    assert (status, err) == (0, "")
    assert "kivi-4bit:group=8" in out and "reference" in out
    assert "least" not in out  # of a GPU alone


@pytest.mark.long
def test_bench_measures_every_size(run, tmp_path):
    asked = ("bench", "--shape", "smollm2", "--method", "kivi-4bit", "--layers", 1, "--rounds", 1)
    asked += ("--context", 12, "--context", 20, "--batch", 1, "--batch", 2, "--device", "cpu")
    status, out, err = run(*asked, "--json", tmp_path / "rows.json")
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert (status, err, len(out.splitlines())) == (0, "", 1 + len(rows))
    full = [(row["context"], row["batch"]) for row in rows if row["method"] == "full"]
    assert full == [(12, 1), (12, 2), (20, 1), (20, 2)]
    assert {row["measured"] for row in rows} == {"attention of 1 layers"}


@pytest.mark.long
def test_a_stopped_bench_goes_on_with_the_sizes_that_are_left(run, tmp_path, monkeypatch):
    asked = ("bench", "--shape", "smollm2", "--method", "kivi-4bit", "--layers", 1, "--rounds", 1)
    asked += ("--context", 12, "--context", 20, "--device", "cpu", "--json", tmp_path / "rows.json")
    asked += ("--resume", tmp_path / "kept")
    measure, measured = bench.bench, []

    def watched(models, methods, settings, *rest):
        if settings.context in measured:
            raise KeyboardInterrupt
        measured.append(settings.context)
        return measure(models, methods, settings, *rest)

    def rows():
        return [
            {name: value for name, value in row.items() if name != "environment"}
            for row in json.loads((tmp_path / "rows.json").read_text())
        ]

    monkeypatch.setattr(bench, "bench", watched)
    measured.append(20)
    assert run(*asked)[0] == 130
    first = rows()
    assert {row["context"] for row in first} == {12}
    measured.remove(20)
    assert run(*asked)[0] == 0
    assert measured == [12, 20]
    assert rows()[: len(first)] == first
    assert [row["context"] for row in rows()] == [12] * len(first) + [20] * len(first)
    # Other contenders, other rounds: other measurements.
    monkeypatch.setattr(bench, "bench", lambda *_: [])
    assert run(*asked, "--method", "kivi-2bit")[0] == 0
    assert rows() == []


def test_a_bench_that_is_stopped_shows_its_rounds(run, tmp_path, monkeypatch):
    asked = ("bench", "--shape", "smollm2", "--method", "kivi-4bit", "--layers", 1, "--rounds", 3)
    asked += ("--context", 12, "--device", "cpu", "--resume", tmp_path / "kept")
    file, see = tmp_path / "rows.json", Report.see

    def stop(report, rows):
        see(report, rows)
        if rows[0]["rounds"] == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Report, "see", stop)
    status, out, _ = run(*asked, "--json", file)
    assert status == 130 and "12 tokens, batch 1: 2 of 3 rounds" in out
    (table, *_) = out.splitlines()
    assert table.startswith("method") and "kivi-4bit" in out
    assert {(row["rounds"], row["rounds_asked"]) for row in json.loads(file.read_text())} == {(2, 3)}
    status, out, _ = run(*asked, "--json", "-")
    assert status == 130 and {row["rounds"] for row in json.loads(out)} == {2}
    # What is not finished is not taken for finished.
    monkeypatch.setattr(Report, "see", see)
    status, out, _ = run(*asked, "--json", file)
    assert status == 0 and " rounds" not in out
    assert {row["rounds"] for row in json.loads(file.read_text())} == {3}


@pytest.mark.long
def test_a_first_table_comes_before_the_last_round(run, monkeypatch):
    asked = ("bench", "--shape", "smollm2", "--method", "kivi-4bit", "--layers", 1, "--rounds", 2)
    monkeypatch.setattr(bench_report, "FIRST", 0)
    status, out, err = run(*asked, "--context", 12, "--context", 16, "--device", "cpu")
    notes = [line for line in err.splitlines() if "rounds" in line]
    assert status == 0 and " rounds" not in out
    assert notes == [f"{context} tokens, batch 1: 1 of 2 rounds" for context in (12, 16)]


@pytest.mark.long
def test_what_failed_is_tried_again(run, tmp_path, monkeypatch):
    asked = ("bench", "--shape", "smollm2", "--method", "kivi-4bit", "--layers", 1, "--rounds", 1)
    asked += ("--context", 12, "--context", 20, "--device", "cpu", "--resume", tmp_path / "kept")
    measure, measured, reasons = bench.bench, [], {20: "no memory"}

    def flawed(models, methods, settings, *rest):
        measured.append(settings.context)
        rows = measure(models, methods, settings, *rest)
        return [{**row, "failed": reasons.get(settings.context)} for row in rows]

    monkeypatch.setattr(bench, "bench", flawed)
    status, out, _ = run(*asked)
    assert status == 0 and "kivi-4bit, 20 tokens, batch 1: no memory" in out
    reasons.clear()
    status, out, _ = run(*asked)
    assert status == 0 and "no memory" not in out
    assert run(*asked)[0] == 0
    assert measured == [12, 20, 20]


def test_bench_finds_the_largest_batch(run):
    asked = ("bench", "--shape", "tiny", "--largest-batch", "--memory", 0.002, "--device", "cpu")
    asked += ("--method", "kivi-2bit:group=32", "--context", 64)
    status, out, err = run(*asked)
    assert (status, err) == (0, "")
    assert "tokens/s" in out and "kivi-2bit:group=32" in out
    status, out, err = run(*asked, "--json", "-")
    assert [row["method"] for row in json.loads(out)] == ["full", "kivi-2bit:group=32"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "either MODEL or --shape"),
        (("smollm2", "--shape", "llama-3.1-8b"), "either MODEL or --shape"),
        (("--shape", "nothing"), "no shape 'nothing'"),
        (("--shape", "llama-3.1-8b", "--peers"), "not with a shape"),
        (("smollm2", "--largest-batch"), "want a shape"),
        (("--shape", "tiny", "--largest-batch", "--device", "cpu"), "or --memory GB"),
        (("--shape", "tiny", "--device", "nowhere"), "no device 'nowhere'"),
        (("--shape", "llama-3.1-8b", "--kernel", "fast"), "'fast' is not one of"),
        (("--shape", "llama-3.1-8b", "--method", "nope"), "nope"),
    ],
)
def test_bench_refuses_in_one_line(run, arguments, words):
    status, out, err = run("bench", *arguments)
    assert (status, out) == (2, "") and words in err and err.count("\n") == 1


def test_weights_in_fewer_bits(run, model):
    asked = ("bench", model, "--method", "kivi-4bit:group=8", "--context", 20, "--rounds", 1)
    asked += ("--device", "cpu", "--weights-bits", 8)
    status, out, err = run(*asked, "--json", "-")
    assert (status, err) == (0, "")
    assert [row["weights_bits"] for row in json.loads(out)] == [8, 8]
    for more in ("--packed", "--shape"):
        bad = ("bench", "--shape", "smollm2", *asked[2:]) if more == "--shape" else (*asked, more)
        status, out, err = run(*bad)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert "--weights-bits" in err
