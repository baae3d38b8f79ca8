import json
import subprocess
import sys

import pytest

from support.command_line import check_refused
from support.word_tokenizer import model_folder
from xquant.methods import METHODS
from xquant.spec import parse_method

OWN = "tc", "tc-cl", "oscar", "kvtc"
"""What calibrates itself."""


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
    found = {row["name"]: row["calibration"] for row in json.loads(run("methods", "--json", "-")[1])}
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


def test_generate_prints_the_text_then_the_report(run, model):
    asked = ("generate", model, "--prompt", "w5 w6 w7", "--max-new-tokens", 4, "--device", "cpu")
    status, out, err = run(*asked, "--json", "-")
    (row,) = json.loads(out)
    assert (status, err) == (0, "")
    assert (row["method"], row["prompt"], row["tokens"]) == ("kivi-4bit", "w5 w6 w7", 4)
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
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(run, model, text, tmp_path, arguments, message):
    check_refused(run, model, text, tmp_path, arguments, message)


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
    assert "Say what the cache of MODEL takes with each method, from its configuration alone" in words


def test_without_words_it_shows_its_help(run):
    status, out, err = run()
    assert (status, err) == (0, "")
    assert (status, out, err) == run("--help")
    assert "Commands:" in out


@pytest.mark.parametrize(("package", "brings"), [("click", ".[cli]"), ("matplotlib", "./lab[plots]")])
def test_a_missing_extra_is_named(run, monkeypatch, tmp_path, package, brings):
    for name in [name for name in sys.modules if name.startswith("xquant.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    status, _, err = run("compare", "m", "--output", tmp_path / "out")
    assert (status, err.count("\n")) == (2, 1)
    assert f"pip install '{brings}'" in err


def test_the_command_runs_as_a_module():
    command = [sys.executable, "-m", "xquant.cli", "--version"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("xquant ")
