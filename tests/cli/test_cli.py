import json
import os
import subprocess
import sys

import pytest

from support.word_tokenizer import model_folder, text_of
from xquant.bench import run as bench
from xquant.methods import METHODS
from xquant.spec import parse_method

OWN = "tc", "tc-cl", "oscar", "kvtc"
"""What calibrates itself."""


@pytest.fixture
def text(tmp_path):
    (tmp_path / "t.txt").write_text(text_of(100))
    return str(tmp_path / "t.txt")


def test_methods_lists_every_method(run):
    status, out, err = run("methods", "--json", "-")
    rows = json.loads(out)
    assert (status, err) == (0, "")
    assert [row["name"] for row in rows] == list(METHODS)
    keys = {"name", "spec", "paper", "needs_calibration", "summary", "options"}
    keys |= {"calibration", "uncalibrated"}
    keys |= {"schema", "environment"}
    assert all(row.keys() == keys for row in rows)
    status, out, err = run("methods")
    assert (status, err) == (0, "")
    assert all(row["spec"] in out for row in rows)


def test_methods_says_where_a_calibration_comes_from(run):
    found = {
        row["name"]: row["calibration"] for row in json.loads(run("methods", "--json", "-")[1])
    }
    assert found.pop("kvquant") == "from a text"
    assert {found.pop(name) for name in OWN} == {"its own"}
    assert set(found.values()) == {"none"}
    out = run("methods")[1]
    assert "'xquant calibrate' makes it" in out
    assert "kvquant with datatype=nf,scales=online needs none" in out
    for name, method in METHODS.items():
        needed = parse_method(method.example).needs_calibration
        assert needed == (name in ("kvquant", *OWN))
        if method.uncalibrated:
            assert not parse_method(f"{method.example}:{method.uncalibrated}").needs_calibration


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


@pytest.mark.parametrize("content", ["[]", "null", '{"name": "a", "rows": [{"nll": "1"}]}'])
def test_a_part_of_a_run_that_is_something_else_is_measured_again(
    run, model, text, tmp_path, content
):
    asked = ("perplexity", model, "--text", text, "--context", 40, "--windows", 1, "--json", "-")
    asked += ("--resume", tmp_path, "--method", "kivi-4bit:group=8")
    first = json.loads(run(*asked)[1])
    (part,) = tmp_path.rglob("kivi*.json")
    part.write_text(content)
    status, out, err = run(*asked)
    assert (status, err.count("\n")) == (0, 1)
    assert f"'{part}' is not what was written there: it is made anew" in err
    assert json.loads(out)[0]["window_nll"] == first[0]["window_nll"]


def test_generate_prints_the_text_then_the_report(run, model):
    asked = ("generate", model, "--prompt", "w5 w6 w7", "--max-new-tokens", 4, "--device", "cpu")
    status, out, err = run(*asked, "--json", "-")
    (row,) = json.loads(out)
    assert (status, err) == (0, "")
    assert (row["method"], row["prompt"], row["tokens"]) == ("xquant-4bit", "w5 w6 w7", 4)
    assert row["report"]["tokens"] == 6
    assert row["tokens_per_second"] > 0
    assert 0 < row["full_cache_bytes"] < row["cache_bytes"]  # all of it still in the fp32 tail
    status, out, err = run(*asked)
    assert (status, err) == (0, "")
    assert out.startswith(row["text"])
    assert "fp16 cache" in out


def test_sampling_repeats_with_its_seed(run, model):
    asked = ("generate", model, "--prompt", "w5", "--max-new-tokens", 12, "--temperature", 3)

    def sample(seed):
        return json.loads(run(*asked, "--seed", seed, "--json", "-")[1])[0]["text"]

    assert sample(1) == sample(1) != sample(2)


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nonsense", "No such command 'nonsense'"),
        ("methods --nonsense", "No such option"),
        ("methods --json NONE/r.json", "there is no folder"),
        ("methods --json TMP", "is not a file name"),
        ("generate", "Missing argument 'MODEL'"),
        ("generate MODEL --prompt w2 --method xquant-9bit", "bits=9"),
        ("generate MODEL --prompt w2 --method nonsense", "unknown method 'nonsense'"),
        ("generate MODEL --prompt w2 --max-new-tokens 0", "0 is not in the range"),
        ("generate MODEL --prompt w2 --max-new-tokens 512", "past the model's 512 positions"),
        ("generate MODEL --prompt w2 --temperature nan", "temperature of nan"),
        ("generate MODEL --prompt w2 --chat", "no chat template"),
        ("generate MODEL --prompt w2 --dtype int8", "'int8' is not one of"),
        ("generate MODEL --prompt w2 --device nonsense", "no device 'nonsense'"),
        ("generate NONE --prompt w2", "no model folder"),
        ("generate TMP --prompt w2", "is not a model folder"),
        ("perplexity MODEL --text TEXT", "give --method"),
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
    places = {"MODEL": model, "TEXT": text, "TMP": str(tmp_path)}
    places |= {"NONE": str(tmp_path / "none"), "OUT": str(tmp_path / "out")}
    words = []
    for word in arguments.split():
        head, slash, rest = word.partition("/")
        words.append(places.get(head, head) + slash + rest)
    status, out, err = run(*words)
    assert (status, out) == (2, "")
    assert err.startswith("xquant: ")
    assert message in err
    assert err.count("\n") == 1
    assert os.listdir(tmp_path) == ["t.txt"]


def test_damaged_weights_are_bad_input(run, tmp_path):
    folder = model_folder(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(bytes(100))
    status, out, err = run("generate", folder, "--prompt", "w2")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "damaged" in err


@pytest.mark.parametrize("prompt", ["", "   "])
def test_a_prompt_without_tokens_is_refused(run, model, prompt):
    status, out, err = run("generate", model, "--prompt", prompt)
    assert (status, out, err.count("\n")) == (2, "", 1)


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


def test_a_bug_is_not_bad_input(run, monkeypatch):
    def fail(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr("xquant.cli.methods.finish", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        run("methods")


def test_no_description_is_cut_off(run):
    out = run("--help")[1]
    assert "..." not in out.partition("[ARGS]...")[2]
    words = " ".join(out.split())
    assert (
        "Say what the cache of MODEL takes with each method, from its configuration alone" in words
    )


def test_without_words_it_shows_its_help(run):
    status, out, err = run()
    assert (status, err) == (0, "")
    assert (status, out, err) == run("--help")
    assert "Commands:" in out


@pytest.mark.parametrize(("package", "extra"), [("click", "cli"), ("matplotlib", "plots")])
def test_a_missing_extra_is_named(run, monkeypatch, tmp_path, package, extra):
    for name in [name for name in sys.modules if name.startswith("xquant.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    status, _, err = run("compare", "m", "--output", tmp_path / "out")
    assert (status, err.count("\n")) == (2, 1)
    assert f"pip install 'xquant-kv[{extra}]'" in err


def test_the_command_runs_as_a_module():
    command = [sys.executable, "-m", "xquant.cli", "--version"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("xquant ")


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


def test_bench_measures_every_size(run, tmp_path):
    asked = ("bench", "--shape", "smollm2", "--method", "kivi-4bit", "--layers", 1, "--rounds", 1)
    asked += ("--context", 12, "--context", 20, "--batch", 1, "--batch", 2, "--device", "cpu")
    status, out, err = run(*asked, "--json", tmp_path / "rows.json")
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert (status, err, len(out.splitlines())) == (0, "", 1 + len(rows))
    full = [(row["context"], row["batch"]) for row in rows if row["method"] == "full"]
    assert full == [(12, 1), (12, 2), (20, 1), (20, 2)]
    assert {row["measured"] for row in rows} == {"attention of 1 layers"}


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
