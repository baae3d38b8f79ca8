"""Tables of measurements on narrow terminals: the rows of results files, as each verb prints them."""

import json
from pathlib import Path

import pytest

from support.rendered import WIDTHS, check_whole
from xquant_lab.reproduce.experiments import EXPERIMENTS
from xquant_lab.results.diff import changes
from xquant_lab.verbs import bench_tables, compare, perplexity, reproduce
from xquant_lab.verbs import eval as tasks

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def rows(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def changed():
    now = rows("wikitext2-smollm2")
    return changes(now, now)


def experiment(name):
    return lambda: reproduce.print_rows(EXPERIMENTS[name], rows(f"reproduce/{name.replace('/', '-')}"))


TABLES = {
    "perplexity": lambda: perplexity.print_rows(rows("tc-c4-smollm2")),
    "compare --against": lambda: compare.print_changes(changed()),
    "eval": lambda: tasks.print_rows([*rows("longbench-smollm2"), *rows("gsm8k-smollm2")]),
    "bench": lambda: bench_tables.print_rows(rows("bench-smollm2-8k")),
    "bench, beside others": lambda: bench_tables.print_rows(rows("bench-packed-peers-8k")),
    "bench, on a GPU": lambda: bench_tables.print_rows(rows("gpu/attention")),
    "bench --largest-batch": lambda: bench_tables.print_largest(rows("gpu/largest")),
    "reproduce --list": lambda: reproduce.show_list(None),
    **{name: experiment(name) for name in ("xquant/table4", "crosslayer/table1", "kvquant/table1")},
}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("table", TABLES)
def test_no_number_or_name_is_broken(table, width, capsys, monkeypatch):
    check_whole(TABLES[table], width, capsys, monkeypatch)


def test_columns_are_left_out_before_rows_are_stacked(capsys, monkeypatch):
    out = check_whole(TABLES["perplexity"], 80, capsys, monkeypatch)
    assert "\nmethod                perplexity  relative" in out
    assert "\n--wide shows 4 more columns: std. error; in codes; cache, MB; seconds\n" in out
