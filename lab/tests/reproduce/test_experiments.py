"""Every experiment runs on a tiny model."""

import json
import math

import pytest

from support.lm_eval_data import truthfulqa
from support.models import VOCABULARY, tiny
from support.word_tokenizer import text_of, word_tokenizer
from xquant_lab.reproduce import IDS, check_id
from xquant_lab.reproduce.experiments import EXPERIMENTS
from xquant_lab.reproduce.setup import Setup
from xquant_lab.results.plots import as_svg

LONGBENCH = {
    "input": "w2 w3",
    "context": text_of(30),
    "answers": ["w5 Paragraph 5"],
    "all_classes": ["w5", "w6"],
}
GSM8K = {"question": "w2 w3", "answer": "w5 #### 5"}
TRUTHFULQA = "Question,Correct Answers,Incorrect Answers\nw2 w3,w5; w6,w7; w8\n"
APART = ("kvquant/table2", "kvquant/table4", "kvquant/table21")
"""These need longer prompts, or a model that goes on writing: test_kvquant.py runs them."""

SLOW = ("xquant/table2", "kvquant/table3", "kvquant/table5", "crosslayer/table3")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """One row of every task that a table has."""
    folder = tmp_path_factory.mktemp("data")
    tasks = {row.get("task", "") for name in EXPERIMENTS for row in EXPERIMENTS[name].printed}
    rows = {task: LONGBENCH for task in tasks if task.startswith("longbench_")}
    for task, row in (rows | {"gsm8k_test": GSM8K}).items():
        suite, _, name = task.partition("_")
        (folder / suite).mkdir(exist_ok=True)
        (folder / suite / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    truthfulqa(folder)
    return folder


def make(family, data=None):
    model = tiny(family, max_position_embeddings=4096)
    model.generation_config.eos_token_id = list(range(VOCABULARY))  # answers are one token
    tokenizer = word_tokenizer()
    tokenizer.eos_token = "<unk>"  # lm-eval wants one
    return Setup(
        model,
        tokenizer,
        text_of(80),
        context=24,
        windows=1,
        data=data,
        limit=1,
        calibration_text=text_of(60),
        calibration_windows=2,
    )


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name in SLOW else ())
        for name in EXPERIMENTS
        if name not in APART
    ],
)
def test_it_measures_what_the_paper_prints(name, data):
    experiment = EXPERIMENTS[name]
    if experiment.needs == "data":
        pytest.importorskip("lm_eval")
    rows = experiment.run(make("llama", data), experiment.printed)
    assert rows
    for row in rows:
        assert all(math.isfinite(row[metric]) for metric in experiment.metrics)
    identities = [tuple(row[key] for key in experiment.keys) for row in rows]
    assert len(set(identities)) == len(rows)
    if not experiment.like:
        printed = [tuple(row[key] for key in experiment.keys) for row in experiment.printed]
        assert set(printed) <= set(identities)
    if experiment.draw is not None:
        pictures = experiment.draw(rows)
        assert pictures
        assert all(as_svg(figure).startswith("<svg") for figure in pictures.values())


@pytest.mark.parametrize("name", ["xquant/tableB.1", "xquant/tableB.2", "xquant/figureB.2"])
def test_latents_are_looked_at_with_multi_head_attention_too(name):
    experiment = EXPERIMENTS[name]
    assert experiment.run(make("llama-mha"), experiment.printed)


def test_figure_1_is_table_4_for_one_model():
    rows = EXPERIMENTS["xquant/figure1"].run(make("llama"), EXPERIMENTS["xquant/figure1"].printed)
    (row,) = (row for row in rows if row["method"] == "xquant-cl-2bit")
    where = "Llama-2-7B, WikiText-2"
    assert row["paper"]["factor"] == {where: 12.5}
    assert row["paper"]["degradation"] == {where: 0.1}
    assert row["factor"] == pytest.approx(1 / row["cache_ratio"])
    assert row["degradation"] == pytest.approx(row["perplexity"] - row["full_perplexity"])


def test_table_b2_counts_the_layers_whose_outlier_channel_was_predicted():
    rows = EXPERIMENTS["xquant/tableB.2"].run(make("llama"), EXPERIMENTS["xquant/tableB.2"].printed)
    assert [row["k"] for row in rows] == [1, 2, 4, 8]
    for row in rows:
        hits = [found in row["predicted"][layer] for layer, each in row["measured"].items() for found in each]
        assert len(hits) == 5
        assert row["accuracy"] == 100 * sum(hits) / 5
        assert all(len(channels) == row["k"] for channels in row["predicted"].values())
    assert [row["accuracy"] for row in rows] == sorted(row["accuracy"] for row in rows)


def test_the_ids_known_without_torch_are_those_of_the_experiments():
    assert tuple(EXPERIMENTS) == IDS


def test_no_experiment_is_of_that_name():
    with pytest.raises(ValueError, match="no experiment 'xquant/table9'"):
        check_id("xquant/table9")
