import json
import os

import pytest

from support.lm_eval_data import choices, gsm8k, harness_folder, longbench

pytest.importorskip("lm_eval")
from xquant_lab.evals import task_lookup, tasks
from xquant_lab.evals.passkey import PasskeyRow

STORED = "kivi-2bit:group=8"


@pytest.fixture(autouse=True)
def only_our_folders(monkeypatch):
    """lm-eval's whole index takes ten seconds."""
    index = task_lookup._index
    monkeypatch.setattr(task_lookup, "_index", lambda folders: index(folders or task_lookup.FAMILIES))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(harness_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture
def data(tmp_path):
    gsm8k(tmp_path / "data")
    longbench(tmp_path / "data"), longbench(tmp_path / "data", "2wikimqa")
    return tmp_path / "data"


def test_it_prints_a_table_or_json_or_both(run, model, data, tmp_path):
    asked = ("eval", model, "--method", STORED, "--task", "longbench_hotpotqa", "--limit", 2)
    asked += ("--data", data)
    status, out, err = run(*asked, "--json", "-")
    rows = json.loads(out)
    assert (status, err) == (0, "")
    keys = {"method", "task", "metric", "value", "stderr", "n", "agreement", "seconds"}
    assert all(keys | {"environment", "schema", "lm_eval"} <= row.keys() for row in rows)
    assert [row["method"] for row in rows] == ["full", "full", STORED, STORED]
    assert (rows[0]["n"], rows[0]["agreement"], rows[0]["data"]) == (2, 2, "data")
    status, out, err = run(*asked, "--batch-size", 2, "--json", tmp_path / "r.json")
    assert (status, err) == (0, "")
    assert "2 of 2" in out and "qa_f1_score" in out
    assert len(json.loads((tmp_path / "r.json").read_text())) == 4


def test_tasks_go_on_where_they_were_stopped(run, model, data, tmp_path, monkeypatch):
    asked = ("eval", model, "--method", STORED, "--data", data, "--limit", 1, "--json", "-")
    asked += ("--resume", tmp_path / "runs", "--task", "longbench_hotpotqa")
    first = [row["value"] for row in json.loads(run(*asked)[1])]
    rest, ran = tasks._run, []

    def watched(lm, task, *more):
        ran.append(task.task_name)
        return rest(lm, task, *more)

    monkeypatch.setattr(tasks, "_run", watched)
    rows = json.loads(run(*asked, "--task", "longbench_2wikimqa")[1])
    assert [row["value"] for row in rows if row["task"] == "longbench_hotpotqa"] == first
    assert ran == ["longbench_2wikimqa"] * 2


def test_passkey_is_our_own(run, model, tmp_path, monkeypatch):
    asked = []

    def passkey(model, tokenizer, methods, prompts, attend, *more):
        asked.append((methods, prompts))
        return [
            PasskeyRow(method.spec, context, 0.5, 1, 4, -0.5, attend, 2.0)
            for method in methods
            for context in prompts.contexts
        ]

    monkeypatch.setattr("xquant_lab.evals.passkey.passkey", passkey)
    words = ("eval", model, "--method", STORED, "--task", "passkey", "--context", 96, "--limit", 4)
    status, out, err = run(*words, "--task", choices(tmp_path), "--json", "-")
    assert (status, err) == (0, "")
    rows = json.loads(out)
    assert [row["task"] for row in rows][:3] == ["passkey", "passkey", "choices"]
    assert (rows[1]["method"], rows[1]["value"], rows[1]["n"]) == (STORED, 0.25, 4)
    ((methods, prompts),) = asked
    assert [method.spec for method in methods] == ["full", STORED]
    assert (prompts.contexts, prompts.limit) == ((96,), 4)
    assert "passkey 96 at 0.5" in run(*words)[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--method full", "give --task"),
        ("--method nonsense --task gsm8k", "unknown method 'nonsense'"),
        ("--method full --task nonsense", "unknown task 'nonsense'"),
        ("--method full --task gsm8k --data NONE", "does not exist"),
        ("--method full --task truthfulqa_gen --data DATA", "no data for truthfulqa_gen"),
        ("--method full --task gsm8k --data DATA --limit 0", "0 is not in the range"),
        ("--method full --task gsm8k --data DATA --json NONE/r.json", "there is no folder"),
        ("--method full --task gsm8k --data DATA --resume FILE", "is not a folder"),
        ("--method kvquant-3bit-1% --task gsm8k --data DATA", "xquant calibrate"),
    ],
)
def test_bad_input_is_one_line_before_the_model_is_loaded(
    run, data, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.setattr("xquant.load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    places = {"DATA": str(data), "NONE": str(tmp_path / "none")}
    places["FILE"] = str(data / "gsm8k" / "test.jsonl")
    words = [
        places.get(head, head) + slash + rest
        for head, slash, rest in (word.partition("/") for word in arguments.split())
    ]
    status, out, err = run("eval", "m", *words)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert os.listdir(tmp_path) == ["data"]


def test_a_context_that_the_model_does_not_reach(run, model):
    asked = ("eval", model, "--method", "full", "--task", "niah_single_1", "--context", 600)
    status, out, err = run(*asked)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "past the model's 512 positions" in err
