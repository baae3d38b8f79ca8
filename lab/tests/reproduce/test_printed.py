import pytest

from xquant import parse_method
from xquant_lab.reproduce.experiments import EXPERIMENTS
from xquant_lab.reproduce.printed import FOLDER, KEYS, add_ratios, printed_rows, read_figures

PAPERS = sorted(file.stem for file in FOLDER.glob("*.toml"))
TABLES = [
    (paper, table) for paper in PAPERS for table, held in read_figures(paper).items()
    if isinstance(held, list)
]  # fmt: skip


def test_a_row_has_what_is_printed_in_all_its_blocks():
    rows = {row["method"]: row for row in printed_rows("xquant", "table1")}
    assert rows["kivi-2bit"]["row"] == "KIVI*-2bit"
    perplexity = rows["kivi-2bit"]["paper"]["perplexity"]
    assert perplexity["Llama-2-7B, WikiText-2"] == 6.42
    assert perplexity["Llama-3.1-8B, C4"] == 15.98
    assert len(perplexity) == 8
    sizes = {"Llama-2-7B and 13B": 0.13, "Llama-3.1-8B and Mistral-7B": 0.27}
    assert rows["xquant-4bit"]["paper"]["cache_ratio"] == sizes
    assert len(rows["xquant-8bit"]["paper"]["perplexity"]) == 4


def test_columns_may_be_keys():
    rows = printed_rows("xquant", "table2")
    (row,) = (r for r in rows if (r["method"], r["task"]) == ("xquant-2bit", "longbench_lcc"))
    assert row["paper"] == {"score": {"Llama-3.1-8B-Instruct": 57.6}}


def test_a_figure_prints_nothing():
    assert printed_rows("xquant", "figure3") == []


def test_ratios_are_to_the_full_cache_of_the_same_model_and_text():
    rows = printed_rows("xquant", "table1")
    add_ratios(rows)
    assert set(rows[0]["paper"]["ratio"].values()) == {1.0}
    (kivi,) = (row for row in rows if row["method"] == "kivi-2bit")
    assert kivi["paper"]["ratio"]["Mistral-7B, C4"] == pytest.approx(9.88 / 8.47, abs=1e-4)


@pytest.mark.parametrize(("paper", "table"), TABLES)
def test_every_row_fills_its_columns_and_names_a_method(paper, table):
    for block in read_figures(paper)[table]:
        lists = [facts for facts in block["columns"].values() if isinstance(facts, list)]
        keys = block.get("keys", KEYS)
        width = len(keys) + (len(lists[0]) if lists else 1)
        assert {len(facts) for facts in lists} <= {width - len(keys)}
        assert {len(row) for row in block["rows"]} == {width}
    for row in printed_rows(paper, table):
        if "method" in row:
            assert parse_method(row["method"]).spec == row["method"]


@pytest.mark.parametrize(("paper", "table"), TABLES)
def test_every_table_is_shown_by_an_experiment(paper, table):
    names = [e.id for e in EXPERIMENTS.values()]
    names += [f"{paper}/{e.like}" for e in EXPERIMENTS.values()]
    assert f"{paper}/{table}" in names
