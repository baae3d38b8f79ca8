import json
import os

import pytest

from support.lm_eval_data import harness_folder, longbench
from xquant_lab.reproduce.experiments import EXPERIMENTS
from xquant_lab.verbs.reproduce import Sources, check_needs


def test_list_shows_every_experiment(run):
    status, out, err = run("reproduce", "--list", "--json", "-")
    rows = {row["id"]: row for row in json.loads(out)}
    assert (status, err) == (0, "")
    assert list(rows) == list(EXPERIMENTS)
    assert rows["xquant/table1"]["paper"] == "XQuant, arXiv 2508.10395"
    assert (rows["xquant/table1"]["needs"], rows["xquant/table1"]["calibrates"]) == ("text", False)
    assert (rows["xquant/table4"]["needs"], rows["xquant/table4"]["calibrates"]) == ("text", True)
    assert (rows["kvquant/table8"]["needs"], rows["kvquant/table8"]["calibrates"]) == ("", False)
    assert rows["xquant/table3"]["needs"] == "data"
    assert rows["kvquant/figure3"]["calibrates"] is True
    status, out, err = run("reproduce", "--list")
    assert (status, err) == (0, "")
    assert all(name in out for name in EXPERIMENTS)


def test_a_table_is_measured_and_shown_beside_the_papers(run, model, text, tmp_path):
    asked = ("reproduce", "xquant/table1", model, "--text", text, "--context", 32)
    asked += ("--windows", 1, "--device", "cpu")
    status, out, err = run(*asked, "--json", "-")
    rows = json.loads(out)
    assert (status, err) == (0, "")
    assert rows[0]["experiment"] == "xquant/table1"
    assert (rows[0]["model"], rows[0]["text"]) == (model, "t.txt")
    assert rows[1]["row"] == "KIVI*-4bit"
    assert rows[1]["paper"]["perplexity"]["Mistral-7B, C4"] == 8.51
    status, out, err = run(*asked)
    assert (status, err) == (0, "")
    for said in ("XQuant, arXiv 2508.10395", "KIVI*-4bit", "15.98", f"{rows[1]['perplexity']:.4g}"):
        assert said in out


def test_a_figure_is_written_as_rows_and_pictures(run, model, text, tmp_path):
    folder = tmp_path / "new"
    status, out, err = run(
        "reproduce", "xquant/figure3", model, "--text", text, "--context", 32, "--windows", 1,
        "--output", folder,
    )  # fmt: skip
    assert (status, err) == (0, "")
    assert "cosine" in out
    stem = "xquant-figure3"
    assert set(os.listdir(folder)) == {f"{stem}.json", f"{stem}-cosine.svg", f"{stem}-cosine.png"}
    rows = json.loads((folder / f"{stem}.json").read_text())
    assert {row["state"] for row in rows} == {"X", "key", "value"}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ([], "--list shows the experiments"),
        (["xquant/table1"], "--list shows the experiments"),
        (["xquant/table9", "MODEL"], "no experiment 'xquant/table9'"),
        (["xquant/table1", "MODEL"], "is measured on a text: give --text FILE"),
        (["kvquant/table21", "MODEL", "--text", "TEXT"], "give --calibration-text FILE"),
        (["kvquant/figure3", "MODEL"], "is measured on a text: give --text FILE"),
        (["xquant/table1", "MODEL", "--text", "nowhere.txt"], "no text file 'nowhere.txt'"),
        (["xquant/table1", "MODEL", "--text", "TEXT", "--context", "9999"], "positions"),
        (["xquant/table1", "MODEL", "--text", "TEXT", "--context", "40"], "holds 2 windows of 40"),
        (["xquant/table1", "MODEL", "--text", "TEXT", "--json", "no/where.json"], "cannot write"),
        (["xquant/table1", "MODEL", "--text", "TEXT", "--output", "TEXT"], "not a folder"),
        (["xquant/table1", "MODEL", "--text", "TEXT", "--task", "gsm8k"], "it runs no tasks"),
        (["xquant/table3", "MODEL", "--task", "trec"], "no task 'trec': its tasks are gsm8k"),
    ],
)
def test_bad_input_is_one_line(run, model, text, asked, message):
    named = {"MODEL": model, "TEXT": text}
    status, out, err = run("reproduce", *(named.get(word, word) for word in asked))
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_missing_data_is_named_with_its_form(run, model, text, tmp_path):
    pytest.importorskip("lm_eval")
    status, out, err = run("reproduce", "xquant/table3", model, "--data", tmp_path)
    assert (status, out) == (2, "")
    assert "gsm8k/test.jsonl" in err
    assert "question, answer" in err
    assert err.count("\n") == 1


@pytest.mark.long
def test_tasks_can_be_chosen_and_averages_are_over_them(run, tmp_path):
    pytest.importorskip("lm_eval")
    longbench(tmp_path), longbench(tmp_path, "samsum")
    model = harness_folder(tmp_path / "model")
    asked = ("reproduce", "crosslayer/table3", model, "--data", tmp_path, "--limit", 1)
    status, out, err = run(*asked, "--task", "longbench_samsum", "--json", "-")
    assert (status, err) == (0, "")
    rows = json.loads(out)
    assert {row["task"] for row in rows} == {"longbench_samsum", "average"}
    assert rows[0]["tasks"] == ["longbench_samsum"]
    of_task, of_all = (row for row in rows if row["row"] == "KIVI")
    assert of_task["kl"] == of_all["kl"]


def test_data_of_a_hub_out_of_reach_are_asked_for_before_the_model_is_loaded(run, monkeypatch):
    monkeypatch.setattr("xquant.hub.hub_answers", lambda: False)
    monkeypatch.setattr("xquant_lab.verbs.asked.load", None)
    status, out, err = run("reproduce", "xquant/table3", "smollm2")
    assert (status, out) == (2, "")
    assert "the hub, which has their data, cannot be reached: give --data DIR" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("offline", "answers"), [(True, False), (False, True)])
def test_data_may_be_kept_by_the_hubs_client(monkeypatch, offline, answers):
    pytest.importorskip("lm_eval")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    monkeypatch.setattr("xquant.hub.hub_answers", lambda: answers)
    check_needs(EXPERIMENTS["xquant/table3"], Sources(), ())


def test_a_calibration_is_as_good_as_a_text_for_one():
    check_needs(EXPERIMENTS["kvquant/table21"], Sources("t.txt"), ["made.safetensors"])
