import json
from types import SimpleNamespace

import pytest

from support.lm_eval_data import (
    choices,
    gsm8k,
    harness_folder,
    longbench,
    truthfulqa,
    words,
    write_lines,
)
from support.models import tiny

pytest.importorskip("lm_eval")
from xquant.runs import Runs
from xquant_lab.evals import task_lookup, tasks
from xquant_lab.evals.journal import Journal
from xquant_lab.evals.task_lookup import find_tasks
from xquant_lab.evals.tasks import Settings, evaluate

STORED = "kivi-2bit:group=8"


@pytest.fixture(autouse=True)
def only_our_folders(monkeypatch):
    """lm-eval's whole index takes ten seconds, and the hub is not there."""
    index = task_lookup._index
    monkeypatch.setattr(task_lookup, "_index", lambda folders: index(folders or task_lookup.FAMILIES))
    monkeypatch.setattr("datasets.load.HfApi", lambda *_, **__: pytest.fail("asked the hub"))


@pytest.fixture(autouse=True)
def few_words(monkeypatch):
    """lm-eval pairs all adjectives with all nouns and sorts them when RULER is imported: ten seconds."""
    words = {kind: [f"{kind}{i}" for i in range(9)] for kind in ("nouns", "adjectives", "verbs")}
    monkeypatch.setattr("wonderwords.RandomWord", lambda: SimpleNamespace(_categories=words))


@pytest.fixture(scope="module")
def model():
    return tiny("llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """RULER's generators load the tokenizer by its name, so it has to lie somewhere."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(harness_folder(tmp_path_factory.mktemp("model")))


def first_prompt(one, tokenizer):
    (task,) = one.build(tokenizer)
    task.build_all_requests(limit=1)
    return task.instances[0].args[0]


@pytest.mark.long
def test_gsm8k_with_local_rows_has_fixed_examples(model, tokenizer, tmp_path, capfd):
    gsm8k(tmp_path)
    (one,) = find_tasks(["gsm8k"], tmp_path)
    prompt = first_prompt(one, tokenizer)
    assert prompt.count("Q: ") == 9 and "The answer is 39." in prompt
    assert prompt.endswith(f"Q: {words(0, 9)}\nA:")
    capfd.readouterr()
    rows = evaluate(model, tokenizer, [STORED], [one], Settings(limit=2, batch_size=2))
    assert capfd.readouterr() == ("", "")
    assert [(row.method, row.metric) for row in rows] == [
        ("full", "exact_match,strict-match"),
        ("full", "exact_match,flexible-extract"),
        (STORED, "exact_match,strict-match"),
        (STORED, "exact_match,flexible-extract"),
    ]
    assert {(row.task, row.lm_eval_task, row.n, row.shots) for row in rows} == {("gsm8k", "gsm8k_cot", 2, 8)}
    assert [row.agreement for row in rows] == [2, 2, 0, 0]  # noise, at 2 bits, on random weights


def test_gsm8k_takes_examples_from_a_training_split(tokenizer, tmp_path):
    gsm8k(tmp_path), gsm8k(tmp_path, "train", 6)
    (one,) = find_tasks(["gsm8k"], tmp_path / "gsm8k")
    assert one.build(tokenizer)[0].task_name == "gsm8k"
    assert first_prompt(one, tokenizer).count("Question: ") == 6


@pytest.mark.long
def test_truthfulqa_in_the_form_of_2021(model, tokenizer, tmp_path):
    (one,) = find_tasks(["truthfulqa_gen"], truthfulqa(tmp_path))
    (task,) = one.build(tokenizer)
    assert task.eval_docs[0]["correct_answers"] == ["w5 w6.", "w7.", "I have no comment."]
    assert task.eval_docs[0]["incorrect_answers"] == ["w8.", "w9."]
    rows = evaluate(model, tokenizer, [], [one])
    assert {row.method for row in rows} == {"full"}
    assert {"bleu_max", "bleu_acc", "rougeL_diff"} < {row.metric for row in rows}
    assert all(row.n == row.agreement == 2 for row in rows)


def test_longbench_has_its_own_prompts_and_metrics(model, tokenizer, tmp_path):
    longbench(tmp_path), longbench(tmp_path, "samsum")
    asked = find_tasks(["longbench_hotpotqa", "longbench_samsum"], tmp_path)
    prompt = first_prompt(asked[0], tokenizer)
    assert f"Question: {words(0, 4)}\nAnswer:" in prompt and words(0, 40) in prompt
    rows = evaluate(model, tokenizer, [STORED], asked, Settings(limit=1))
    metrics = {(row.task, row.metric) for row in rows}
    assert ("longbench_hotpotqa", "qa_f1_score") in metrics
    assert ("longbench_samsum", "rouge_score") in metrics


def test_the_best_choice_is_an_answer_and_a_task_may_be_a_file(model, tokenizer, tmp_path):
    rows = evaluate(model, tokenizer, ["xquant-8bit:group=8"], find_tasks([str(choices(tmp_path))]))
    assert [(row.method, row.task, row.metric) for row in rows[::2]] == [
        ("full", "choices", "acc"),
        ("xquant-8bit:group=8", "choices", "acc"),
    ]
    assert {row.agreement for row in rows} == {4}
    assert all(row.stderr is not None and 0 <= row.value <= 1 for row in rows)


def ruler_data(folder):
    essays = " ".join(f"{words(i, 12)}." for i in range(80))
    write_lines(folder / "ruler" / "PaulGrahamEssays.json", [{"text": essays}])
    articles = [
        {
            "title": "w2",
            "paragraphs": [
                {
                    "context": words(i, 30),
                    "qas": [{"question": words(i, 4), "answers": [{"text": words(i, 2)}]}],
                }
            ],
        }
        for i in range(12)
    ]
    write_lines(folder / "ruler" / "squad.json", [{"data": articles}])
    questions = [
        {
            "question": words(i, 5),
            "answer": words(i, 1),
            "context": [[words(i, 1), [words(i, 9), words(i + 1, 9)]]],
        }
        for i in range(12)
    ]
    (folder / "ruler" / "hotpotqa.json").write_text(json.dumps(questions))
    return folder


def test_ruler_is_made_by_lm_eval_from_local_files(model, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("xquant_lab.evals.task_data.RULER_SAMPLES", 3)
    data = ruler_data(tmp_path)
    (essays,) = find_tasks(["niah_single_2"], data, [900])  # lm-eval grows these by 500 words at a time
    prompt = first_prompt(essays, tokenizer)
    assert "special magic number" in prompt and words(1, 12) in prompt
    asked = find_tasks(["ruler_qa_squad", "ruler_qa_hotpot"], data, [300])
    prompts = [first_prompt(one, tokenizer) for one in asked]
    assert all("Document 1:" in prompt for prompt in prompts)
    assert all(len(tokenizer(prompt)["input_ids"]) <= 300 for prompt in prompts)
    rows = evaluate(model, tokenizer, [STORED], asked, Settings(limit=1))
    assert [(row.method, row.task, row.metric, row.context) for row in rows] == [
        ("full", "ruler_qa_squad", "300", 300),
        (STORED, "ruler_qa_squad", "300", 300),
        ("full", "ruler_qa_hotpot", "300", 300),
        (STORED, "ruler_qa_hotpot", "300", 300),
    ]


def test_rows_do_not_depend_on_what_was_made_before_them(tokenizer, tmp_path):
    asked = find_tasks(["niah_single_1"], contexts=[200, 220])
    alone = first_prompt(asked[1], tokenizer)
    first_prompt(asked[0], tokenizer)
    assert first_prompt(asked[1], tokenizer) == alone


def test_a_stopped_run_goes_on_from_what_is_finished(model, tokenizer, tmp_path, monkeypatch):
    asked = find_tasks([str(choices(tmp_path))])
    runs = Runs(tmp_path / "runs", {"model": "tiny"})

    def go(methods, *tell):
        journal = Journal(runs, *tell)
        rows = evaluate(model, tokenizer, methods, asked, Settings(limit=2), journal=journal)
        return [row.to_dict() for row in rows]

    first = go([STORED])
    monkeypatch.setattr(tasks, "_run", lambda *_: pytest.fail("ran again"))
    seen = []
    assert go([STORED], lambda *now: seen.append(now)) == first
    assert seen == [(2, 2, "")]
    with pytest.raises(pytest.fail.Exception, match="ran again"):
        go(["kivi-4bit:group=8"])


def test_progress_counts_parts_and_requests(model, tokenizer, tmp_path):
    seen = []
    asked = find_tasks([str(choices(tmp_path))])
    journal = Journal(tell=lambda *now: seen.append(now))
    evaluate(model, tokenizer, [STORED], asked, Settings(limit=1), journal=journal)
    assert [(done, total) for done, total, _ in seen] == [(0, 2)] * 4 + [(1, 2)] * 4 + [(2, 2)]
    assert seen[3][2] == f"full, {asked[0].name}: 3 done"


def test_an_answer_longer_than_the_model_is_refused(model, tokenizer, tmp_path):
    longbench(tmp_path, "qmsum")
    with pytest.raises(ValueError, match=r"longbench_qmsum: .*max tokens to generate \(512\)"):
        evaluate(model, tokenizer, [], find_tasks(["longbench_qmsum"], tmp_path))


def test_a_group_is_its_tasks():
    asked = find_tasks(["ruler"], contexts=[1024, 2048])
    assert len(asked) == 2 * 13
    assert asked[0].title == "niah_single_1 1024"


@pytest.mark.parametrize(
    ("names", "data", "message"),
    [
        (["gsm8"], ".", "unknown task 'gsm8'; is it gsm8k"),
        (["gsm8k"], "none", "there is no data"),
        (["gsm8k"], "empty", r"no data for gsm8k: .* one JSON object a line with question, answer"),
        (["gsm8k"], "bad/text.jsonl", "line 1: not JSON"),
        (["gsm8k"], "bad/list.jsonl", "line 1: not a JSON object"),
        (["gsm8k"], "bad/other.jsonl", r"line 1: no 'question' \(one JSON object"),
        (["gsm8k"], "bad/nothing.jsonl", "holds no rows"),
        (["truthfulqa_gen"], "empty", "no data for truthfulqa_gen: .* one CSV line with Question"),
        (["longbench_qasper"], "empty", "no 'longbench/qasper.jsonl'"),
        (["niah_single_2"], "empty", "no 'ruler/PaulGrahamEssays"),
        (["ruler_qa_squad"], "bad/other.jsonl", "does not fit ruler_qa_squad"),
        (["truthfulqa_mc1"], "bad/other.jsonl", "does not fit truthfulqa_mc1"),
    ],
)
def test_bad_input_is_told_of_when_a_task_is_asked_for(tmp_path, names, data, message):
    (tmp_path / "empty").mkdir()
    write_lines(tmp_path / "bad" / "other.jsonl", [{"other": 1}])
    (tmp_path / "bad" / "text.jsonl").write_text("w5\n")
    (tmp_path / "bad" / "list.jsonl").write_text("[1]\n")
    (tmp_path / "bad" / "nothing.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=message):
        find_tasks(names, tmp_path / data)


def test_a_context_that_lm_eval_would_look_for_ever_to_fill():
    with pytest.raises(ValueError, match="ruler_vt cannot be made to 512 tokens"):
        find_tasks(["ruler_vt"], contexts=[512])


def test_a_training_split_that_is_needed_and_missing(tmp_path):
    gsm8k(tmp_path)
    data = tmp_path / "gsm8k" / "test.jsonl"
    with pytest.raises(ValueError, match="takes its 5 examples from a 'train' split"):
        task_lookup.task_data.local_rows(
            "gsm8k", {"test_split": "test", "training_split": "train", "num_fewshot": 5}, data
        )


def test_what_the_hub_does_not_give_may_be_given_as_a_file(monkeypatch):
    def offline(*_, **__):
        raise ConnectionError("no network")

    monkeypatch.setattr("datasets.load_dataset", offline)
    with pytest.raises(ValueError, match=r"gsm8k cannot be had .*no network.* with --data"):
        find_tasks(["gsm8k"])


def test_a_context_past_the_positions_is_refused_before_anything_runs(model, tokenizer):
    asked = find_tasks(["niah_single_1"], contexts=[600])
    with pytest.raises(ValueError, match="600 is past the model's 512 positions"):
        evaluate(model, tokenizer, [], asked)
