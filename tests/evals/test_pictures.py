import re

import pytest

from xquant.evals.page import render_page
from xquant.evals.plots import families, perplexity_figure
from xquant.evals.results import stamp


def row(method, ratio, cache_ratio):
    return {
        "method": method,
        "perplexity": 10 * ratio,
        "full_perplexity": 10.0,
        "ratio": ratio,
        "bits_per_value": 16 * cache_ratio,
        "code_bits": 15 * cache_ratio,
        "cache_ratio": cache_ratio,
        "cache_bytes": int(1e6 * cache_ratio),
        "full_cache_bytes": 1_000_000,
        "tokens": 2047,
        "windows": 1,
        "context": 2048,
        "seconds": 1.5,
        "window_nll": [2.3],
    }


ROWS = [
    row("full", 1.0, 1.0),
    row("xquant-4bit", 1.01, 0.27),
    row("xquant-2bit:sink=1", 2.0, 0.14),
    row("kivi-4bit", 1.012, 0.271),
    row("kivi-2bit", float("inf"), 0.14),
]


def test_points_are_by_family_without_the_baseline_and_what_is_not_finite():
    found = families(ROWS)
    assert found["kivi"] == [(pytest.approx(1 / 0.271), 1.012, "4bit")]
    assert [label for _, _, label in found["xquant"]] == ["4bit", "2bit:sink=1"]
    assert "full" not in found


@pytest.mark.parametrize("rows", [ROWS, ROWS[:2], ROWS[:1]])
def test_the_figure_is_an_svg_and_a_png_and_the_same_every_time(rows):
    svg, png = perplexity_figure(rows)
    assert svg.startswith("<svg")
    assert svg.rstrip().endswith("</svg>")
    assert png.startswith(b"\x89PNG")
    assert perplexity_figure(rows)[0] == svg


def test_the_page_needs_no_network_and_escapes_what_it_shows():
    svg, _ = perplexity_figure(ROWS)
    rows = stamp(ROWS, model="a<b>", text="t.txt", dtype="float32", device="cpu")
    page = render_page(rows, svg)
    assert "a&lt;b&gt;" in page
    assert "a<b>" not in page
    assert page.count("<tr>") == 1 + len(ROWS)
    assert not re.search(r"<(script|link|img|iframe)\b|@import|url\((?!#)|href=\"(?!#)", page)
    for said in ("xquant-2bit:sink=1", rows[0]["environment"]["torch"], "float32", "t.txt"):
        assert said in page
