"""The pages of docs/papers/: a section and a verdict for every experiment, and every results file shown."""

import importlib
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from xquant_lab.reproduce.experiment import AVERAGE, Experiment
from xquant_lab.reproduce.experiments import EXPERIMENTS

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
IMAGES = ROOT / "docs" / "images" / "papers"


@pytest.fixture
def papers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("measured.papers")


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("measured.beside")


every = pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=lambda one: one.id)


@every
def test_an_experiment_has_a_section_with_a_verdict_and_its_table(
    experiment: Experiment, papers: ModuleType
) -> None:
    verdict = papers.verdict(experiment)
    assert verdict != papers.OPEN
    (section,) = papers.sections(papers.paper_of(experiment))[papers.heading(experiment)]
    assert re.findall("<!-- table: (.+) -->", section) == [experiment.id]


@every
def test_a_verdict_stands_on_a_results_file_and_a_reason(
    experiment: Experiment, papers: ModuleType, beside: ModuleType
) -> None:
    assert beside.results(experiment)
    (section,) = papers.sections(papers.paper_of(experiment))[papers.heading(experiment)]
    reason = section[papers.VERDICT.search(section).end() : section.index("<!-- table")]
    assert len(reason.split()) > 5


def test_all_sections_are_of_experiments(papers: ModuleType) -> None:
    pages = {path.stem for path in papers.PAGES.glob("*.md")} - {"index"}
    assert pages == {papers.paper_of(experiment) for experiment in EXPERIMENTS.values()}
    known = {papers.heading(experiment) for experiment in EXPERIMENTS.values()}
    for page in pages:
        assert papers.sections(page).keys() <= known


def test_all_results_files_are_shown(beside: ModuleType) -> None:
    shown = set()
    for experiment in EXPERIMENTS.values():
        for file in beside.results(experiment):
            assert {row["experiment"] for row in json.loads(file.read_text())} == {experiment.id}
            shown.add(file)
    assert shown == set(beside.FOLDER.iterdir())


def test_all_pictures_are_drawn(beside: ModuleType) -> None:
    pytest.importorskip("matplotlib")
    wanted = {
        beside.picture(file, name)
        for experiment in EXPERIMENTS.values()
        for file in beside.results(experiment)
        for name in beside.pictures(experiment, file)
    }
    found = {path.name: path.stat().st_size for path in IMAGES.iterdir()}
    assert found.keys() == wanted
    assert all(1_000 < size < 300_000 for size in found.values())


def test_abstracts_have_a_known_verdict_for_each_claim(papers: ModuleType) -> None:
    page = (papers.PAGES / "index.md").read_text()
    (claims,) = re.findall("^## What the abstracts claim\n(.*?)^## ", page, re.M | re.S)
    items = [" ".join(item.split()) for item in re.split("^- ", claims, flags=re.M)[1:]]
    assert len(items) == 7
    for item in items:
        (verdict,) = re.findall(r"\*: \*\*(.+?)\*\*", item)
        assert verdict in papers.VERDICTS
        assert verdict != papers.OPEN


@pytest.mark.parametrize("verdicts", [(), ("holds", "holds"), ("proven",)], ids=["none", "two", "unknown"])
def test_a_section_without_one_known_verdict_is_refused(
    verdicts: tuple[str, ...], papers: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    experiment = EXPERIMENTS["xquant/table1"]
    lines = "".join(f"**Verdict: {verdict}.** Why.\n\n" for verdict in verdicts)
    (tmp_path / "xquant.md").write_text(f"## {papers.heading(experiment)}\n\n{lines}")
    monkeypatch.setattr(papers, "PAGES", tmp_path)
    with pytest.raises(ValueError, match="xquant/table1 needs one verdict"):
        papers.verdict(experiment)


def test_two_sections_of_one_experiment_are_refused(
    papers: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    experiment = EXPERIMENTS["xquant/table1"]
    (tmp_path / "xquant.md").write_text(2 * f"## {papers.heading(experiment)}\n\n")
    monkeypatch.setattr(papers, "PAGES", tmp_path)
    with pytest.raises(ValueError, match="has 2 sections"):
        papers.verdict(experiment)


def measured(
    experiment: Experiment, model: str = "smollm2", text: str = "wikitext2/test.raw"
) -> list[dict[str, Any]]:
    """Rows as an experiment leaves them, with numbers that tell them apart."""
    command = f"xquant reproduce {experiment.id} --text {text} --calibration-text wikitext2/train.raw"
    made = {"model": model, "size": {"context": 2048}, "environment": {"command": command}}
    rows = []
    for number, printed in enumerate(experiment.printed, 1):
        row = {**printed, **made, **dict.fromkeys(experiment.metrics, number / 7)}
        if "ratio" in experiment.metrics:
            row |= {"difference_error": 0.01, "kl": number / 9}
        if "task" in experiment.keys:
            row |= {"n": 50, "same_tokens": 0.5, "kl": number / 9}
        rows.append(row)
    return rows


@every
def test_a_table_of_any_experiment_is_narrow_and_has_what_is_printed(
    experiment: Experiment, beside: ModuleType
) -> None:
    rows = measured(experiment)
    if not rows or "layer" in experiment.keys:
        return
    head, _, *body = (
        [cell.strip() for cell in line.strip("| ").split(" | ")]
        for line in beside.by_row(experiment, rows).splitlines()
        if line.startswith("|")
    )
    assert len(head) <= 8 or ("task" in experiment.keys and len(head) <= 10)
    assert body and all(cells[0] for cells in body)
    if "task" not in experiment.keys:
        assert len(body) == len(rows)


def test_tasks_are_averaged_as_the_paper_does(beside: ModuleType) -> None:
    experiment = EXPERIMENTS["xquant/table2"]
    rows = measured(experiment)
    shown = beside.averaged(experiment, rows)
    assert [row["method"] for row in shown] == list(dict.fromkeys(row["method"] for row in rows))
    own = [row["score"] for row in rows if row["method"] == "full" and row["task"] != AVERAGE]
    assert shown[0]["score"] == pytest.approx(sum(own) / 14)
    assert shown[0]["n"] == 14 * 50
    assert shown[0]["paper"]["score"] == {"Llama-2-7B-Chat": 37.1, "Llama-3.1-8B-Instruct": 48.5}


def test_an_average_is_computed_only_of_all_tasks(beside: ModuleType) -> None:
    """Of two tasks the paper prints no average, and the width once for both."""
    experiment = EXPERIMENTS["crosslayer/table6"]
    place = "Mistral-7B-Instruct-v0.2"
    rows = measured(experiment)
    found = beside.averaged(experiment, rows)[0]["paper"]
    assert {name: values for name, values in found.items() if values} == {
        "score": {place: pytest.approx((18.78 + 48.26) / 2)},
        "code_bits": {place: 16},
    }
    del rows[0]["paper"]["score"]
    assert beside.averaged(experiment, rows)[0]["paper"]["score"] == {}


def test_tasks_with_other_methods_are_not_averaged(beside: ModuleType) -> None:
    experiment = EXPERIMENTS["crosslayer/table7"]
    rows = measured(experiment)
    assert beside.averaged(experiment, rows) == rows


@pytest.mark.parametrize(
    ("model", "text", "places"),
    [
        ("smollm2", "wikitext2/test.raw", ["Llama-3.1-8B, WikiText-2", "Mistral-7B, WikiText-2"]),
        ("smollm2", "c4.jsonl", ["Llama-3.1-8B, C4", "Mistral-7B, C4"]),
        (
            "smollm2-mha",
            "wikitext2/test.raw",
            ["Llama-2-7B, WikiText-2", "Llama-2-13B, WikiText-2"],
        ),
    ],
)
def test_xquant_stands_beside_models_of_its_kind_and_text(
    model: str, text: str, places: list[str], beside: ModuleType
) -> None:
    rows = measured(EXPERIMENTS["xquant/table1"], model, text)
    head = beside.by_row(EXPERIMENTS["xquant/table1"], rows).splitlines()[0]
    assert re.findall(r"paper: (\S+, \S+) ", head) == places


def test_the_nearest_context_is_shown(beside: ModuleType) -> None:
    table = beside.by_row(EXPERIMENTS["kvquant/table2"], measured(EXPERIMENTS["kvquant/table2"]))
    assert "paper: LLaMA-2-7B-32K, 2K |" in table and "32K, 16K" not in table
