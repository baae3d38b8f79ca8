import json
import math
from dataclasses import replace

import pytest
import torch

from support.lm_eval_data import harness_folder, words
from support.models import tiny
from support.word_tokenizer import text_of, word_tokenizer
from xquant.analysis.shapes import shape_config
from xquant_lab.reproduce import kvquant_figures, kvquant_states, kvquant_tasks
from xquant_lab.reproduce.experiments import EXPERIMENTS
from xquant_lab.reproduce.setup import Setup


def make(**changes):
    setup = Setup(
        tiny("llama"),
        word_tokenizer(),
        text_of(160),
        context=64,
        windows=2,
        limit=5,
        calibration_text=text_of(140),
        calibration_windows=2,
    )
    return replace(setup, **changes)


def run(name, setup):
    experiment = EXPERIMENTS[f"kvquant/{name}"]
    rows = experiment.run(setup, experiment.printed)
    assert [row["method"] for row in rows] == [row["method"] for row in experiment.printed]
    for row in rows:
        assert all(math.isfinite(row[metric]) for metric in experiment.metrics)
    return {row["method"]: row for row in rows}


@pytest.mark.long
def test_passkeys_are_asked_for_at_every_depth():
    rows = run("table2", make())
    assert {row["n"] for row in rows.values()} == {5}
    paper = rows["kvquant-3bit-1%"]["paper"]
    assert paper["success"]["LLaMA-2-7B-32K, 2K"] == 0.98
    assert paper["cache_ratio"]["Llama-2-70B-32K, 32K"] == round(3.35 / 16, 4)


@pytest.mark.long
def test_ruler_is_of_as_many_tokens_as_the_context(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    from transformers import AutoTokenizer

    monkeypatch.setattr("xquant_lab.evals.task_data.RULER_SAMPLES", 2)
    question = {"question": words(0, 4), "answer": "w5", "context": [["w3", ["w5 w6", "w7"]]]}
    (tmp_path / "ruler").mkdir()
    (tmp_path / "ruler" / "hotpot.json").write_text(json.dumps([question] * 12))
    tokenizer = AutoTokenizer.from_pretrained(harness_folder(tmp_path / "model"))
    setup = make(tokenizer=tokenizer, data=tmp_path, context=300, limit=1)
    setup.calibration_text = text_of(620)
    experiment = EXPERIMENTS["kvquant/table4"]
    printed = [r for r in experiment.printed if r["task"] in ("ruler_qa_hotpot", "average")]
    rows = experiment.run(setup, printed)
    assert len(rows) == 8
    for row in rows:
        assert row["score"] in (0, 100)
        assert row["agreement"] <= 1


def test_the_row_of_a_task_that_the_paper_does_not_tell_is_measured(monkeypatch):
    monkeypatch.setattr(kvquant_tasks, "scores", lambda setup, rows, **_: rows)
    printed = EXPERIMENTS["kvquant/table3"].printed
    rows = kvquant_tasks.table3(make(), printed)
    assert len(rows) == 3 * 17
    told = [row for row in rows if row["paper"]["score"]]
    assert len(told) == 17 + 2
    assert all(row in told for row in printed)


def test_a_calibration_on_another_text_is_another_result():
    rows = run("table21", make())
    assert any(row["perplexity"] != row["perplexity_generated"] for row in rows.values())
    assert all(len(row["paper"]["perplexity"]) == 4 for row in rows.values())


def test_calibration_texts_are_not_compared_without_one():
    with pytest.raises(ValueError, match="give --calibration-text"):
        run("table21", make(calibration_text=None))


def test_times_are_those_of_one_layer():
    rows = run("table6", make())
    assert rows["full"]["speedup"] == pytest.approx(1)
    paper = rows["kvquant-4bit-1%:datatype=nf,scales=online"]["paper"]
    assert paper["speedup"]["keys, 16K"] == round(219.4 / 126.3, 2)


@pytest.mark.parametrize("table", ["table7", "table8"])
@pytest.mark.parametrize("size", ["7B", "13B", "30B", "65B"])
def test_the_papers_bytes_come_out_for_the_papers_models(table, size):
    class Shape:
        config = shape_config(f"llama-{size.lower()}")
        dtype = torch.float32

    where = f"LLaMA-{size}"
    experiment = EXPERIMENTS[f"kvquant/{table}"]
    printed = [row for row in experiment.printed if where in row["paper"]["cache_gib"]]
    assert printed or (table, size) in {("table8", "13B"), ("table8", "30B")}
    for row in experiment.run(make(model=Shape()), printed) if printed else ():
        for metric in ("weights_gib", "cache_gib"):
            if metric in row["paper"]:
                # Half of the last digit that is printed, beside 1%.
                rounding = 0.05 if metric == "weights_gib" or table == "table8" else 0.5
                wanted = row["paper"][metric][where]
                assert row[metric] == pytest.approx(wanted, abs=0.01 * wanted + rounding)


def test_rope_keeps_the_size_of_keys_and_spreads_their_outliers():
    model = tiny("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight[3] *= 30
    experiment = EXPERIMENTS["kvquant/figure2"]
    rows = experiment.run(make(model=model), [])
    found = {(row["layer"], row["state"]): row for row in rows}
    for layer in range(5):
        before, after = (found[layer, name] for name in (kvquant_states.KEYS, kvquant_states.TURNED_KEYS))
        assert before["largest"] == 3
        assert after["times_median"] < before["times_median"]
        assert (layer, kvquant_states.VALUES) in found


def test_percentiles_are_shares_of_the_largest():
    rows = EXPERIMENTS["kvquant/figure4"].run(make(), [])
    assert len(rows) == 5 * 2
    assert all(0 < row["p50"] < row["p90"] < row["p99"] <= 1 for row in rows)


def test_figure_1_has_the_bytes_of_weights_and_caches():
    experiment = EXPERIMENTS["kvquant/figure1"]
    rows = run("figure1", make())
    full, last = rows["full"], rows["kvquant-3bit-1%:scales=offline"]
    model = tiny("llama")
    config = model.config
    token = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers * 2
    assert full["cache_gib_512"] == pytest.approx(512 * token / 2**30, rel=0.03)
    assert full["cache_gib_128k"] == pytest.approx(2**17 * token / 2**30, rel=0.03)
    assert full["weights_gib"] == sum(2 * p.numel() for p in model.parameters()) / 2**30
    assert last["cache_gib_128k"] < full["cache_gib_128k"] / 2
    assert [row["paper"]["perplexity"]["LLaMA-7B, WikiText-2"] for row in experiment.printed] == [
        5.68, 10.87, 7.05, 6.23, 5.94, 5.75, 5.75
    ]  # fmt: skip
    assert set(experiment.draw(list(rows.values()))) == {"sizes", "parts", "paper"}


def test_the_papers_bytes_of_figure_1_come_out_for_its_model():
    class Shape:
        config = shape_config("llama-7b")

    printed = EXPERIMENTS["kvquant/figure1"].printed
    found = kvquant_figures.sizes(Shape(), [row["method"] for row in printed])
    for row, sizes in zip(printed, found, strict=True):
        for metric in ("weights_gib", "cache_gib_128k"):
            if metric in row["paper"]:
                wanted = row["paper"][metric]["LLaMA-7B"]
                assert sizes[metric] == pytest.approx(wanted, abs=0.01 * wanted + 0.05)


@pytest.mark.long
def test_windows_of_figure_3_grow_over_the_same_tokens(monkeypatch):
    calibrated = []
    own = Setup.calibrated
    monkeypatch.setattr(Setup, "calibrated", lambda self, m: calibrated.append(self.context) or own(self, m))
    monkeypatch.setattr(kvquant_figures, "CALIBRATED", 48)
    setup = make()
    rows = EXPERIMENTS["kvquant/figure3"].run(setup, [])
    lengths = [(row["length"], row["windows"]) for row in rows if row["method"] == "full"]
    assert lengths == [(8, 16), (16, 8), (32, 4), (64, 2)]
    assert calibrated[0] == 48
    assert {made.method for made in setup.calibrations} >= {"kvquant-2bit-1%", "tc-cl-2bit"}
    assert len(rows) == 4 * len(kvquant_figures.METHODS)
    for length in (8, 16, 32, 64):
        own_rows = [row for row in rows if row["length"] == length]
        assert {row["full_perplexity"] for row in own_rows} == {own_rows[0]["perplexity"]}


def test_tables_18_and_19_print_table_1_and_c4():
    everything = {row["method"]: row["paper"] for row in EXPERIMENTS["kvquant/table18"].printed}
    for row in EXPERIMENTS["kvquant/table1"].printed:
        for where, value in row["paper"]["perplexity"].items():
            assert everything[row["method"]]["perplexity"][where] == value
    c4 = {row["method"]: row["paper"]["perplexity"] for row in EXPERIMENTS["kvquant/table19"].printed}
    assert list(c4) == list(everything)
    assert [len(values) for values in c4.values()] == [10] * 6 + [6] + [10] * 12
