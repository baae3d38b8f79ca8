import html
import math
import re

import pytest

from support.result_rows import ENVIRONMENT, benched, compared, scored
from xquant_lab.results.page import render_page

ROWS = [
    compared("full", 1.0, 1.0),
    compared("xquant-4bit", 1.01, 0.27),
    compared("xquant-2bit:sink=1", 2.0, 0.14),
    compared("kivi-4bit", 1.012, 0.271),
    compared("kivi-2bit", math.inf, 0.14, difference=math.inf, kl=math.nan),
]
BENCH = [benched("full", 8192, 1.0), benched("kivi-4bit", 8192, 3.0)]
TASKS = [
    scored("full", "gsm8k", 0.1, agreement=50),
    scored("kivi-2bit", "gsm8k", 0.0),
    scored("full", "passkey", 0.75, agreement=None, stderr=None, context=1024),
]


def text_of(page):
    """What a reader sees, without markup and pictures."""
    body = re.sub(r"<(style|svg)\b.*?</\1>|<br>", " ", page, flags=re.S)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", "", body)).split())


@pytest.fixture(scope="module")
def page():
    return render_page(ROWS, BENCH, TASKS, ROWS[:2])


def test_nothing_is_loaded_from_elsewhere(page):
    assert not re.search(r"<(script|link|img|iframe|object)\b|@import|url\((?!#)|src=", page)
    assert not re.search(r"href=\"(?!#)", page)
    assert "http" not in page


def test_pictures_on_one_page_do_not_share_identifiers(page):
    identifiers = re.findall(r' id="([^"]*)"', page)
    assert len(identifiers) == len(set(identifiers))
    used = re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', page)
    assert {a or b for a, b in used} <= set(identifiers)
    assert page.count("<svg") == 4  # two pictures, each for two widths


def test_every_method_has_a_row_and_the_front_is_marked(page):
    for row in ROWS:
        marked = row["method"] in ("xquant-4bit", "xquant-2bit:sink=1")
        assert f'<tr id="{row["method"]}"{" class=" if marked else ">"}' in page
    verdict = "Of 3 compressed caches, 2 are on the Pareto front of size and KL, from xquant-4bit (KL"
    verdict += " 0.0100, the same top token in 95.0% of places, 27.0% of an fp16 cache) to"
    assert f"{verdict} xquant-2bit:sink=1 (KL 1.0000" in text_of(page)


def test_figures_are_rounded_and_what_is_no_number_is_shown_as_such(page):
    text = text_of(page)
    row = "0.0100 95.0% 3.70 27.0% 0.27 4.32 4.05 10.100 1.0100 0.0100 ± 0.0010 1.5"
    assert f"xquant-4bit {row}" in text
    assert "kivi-2bit - 95.0% 7.14" in text and "∞ ∞ ∞ ± 0.0010" in text


def test_pictures_follow_the_colours_of_the_page(page):
    pictures = re.findall(r"<svg.*?</svg>", page, flags=re.S)
    assert not any(re.search(r": ?#[0-9a-f]{3,6}", picture) for picture in pictures)
    used = set(re.findall(r"var\(--([\w-]+)\)", page))
    light, dark = page.split("prefers-color-scheme: dark", 1)
    for part in (light, dark[: dark.index("body {")]):
        assert used <= set(re.findall(r"--([\w-]+): #", part))


def test_every_number_of_the_pictures_stands_in_a_table(page):
    text = text_of(page)
    for row in ROWS[1:4]:
        cells = f"{row['kl']:.4f} {row['agreement']:.1%} {1 / row['cache_ratio']:.2f}"
        assert f"{row['method']} {cells}" in text
    for row in BENCH:
        low, high = row["speedup_min_max"]
        assert f"{row['speedup_vs_full']:.2f} {low:.2f} to {high:.2f}" in text


def test_tables_scroll_in_their_own_box(page):
    tables = page.count("<table>")
    assert tables == 4
    assert len(re.findall(r'<div class="scroll" tabindex="0">\s*<table>', page)) == tables


def test_one_window_has_no_standard_error():
    rows = [compared("full", 1.0, 1.0, windows=1, difference_error=None)]
    text = text_of(render_page(rows))
    assert "±" not in text
    assert "No compressed cache" in text and "1 window of 2,048" in text


def test_how_it_was_measured_is_said_for_every_run(page):
    text = text_of(page)
    for part in ("Perplexity", "Speed", "Tasks", "Earlier run"):
        assert f"{part} xquant compare" in text
    for said in ("commit c0ffee", "torch 2.13.0", "a processor, 2 threads", "m, float32, cpu"):
        assert said in text


def test_what_others_wrote_is_escaped():
    bad = "</title><script>alert(1)</script>"
    rows = [{**row, "model": bad, "text": bad, "calibrations": {bad: bad}} for row in ROWS]
    bench = [benched(bad, 8192, 3.0, model=bad, kernel=bad)]
    tasks = [scored(bad, bad, 0.5, metric=bad)]
    earlier = [{**row, "environment": {**ENVIRONMENT, "cpu": bad}} for row in rows]
    page = render_page(rows, bench, tasks, earlier)
    assert "<script" not in page and page.count("</title>") == 1
    assert "&lt;script&gt;" in page


def test_speeds_are_by_setting_and_tokens_a_second_count_the_batch(page):
    text = text_of(page)
    assert "m, decode, batch 2, 8,192 tokens" in text
    assert "kivi-4bit 13.33 150.0 3.00 1.50 to 6.00 5.0 float32, avx512" in text
    alone = [{**row, "measured": "attention of 8 layers"} for row in BENCH]
    assert "kivi-4bit 13.33 3.00" in text_of(render_page(ROWS, alone))
    only_full = render_page(ROWS, BENCH[:1])
    assert only_full.count("<svg") == 2 and "tokens a second" in only_full


def test_tasks_are_columns_and_agreement_stands_below_the_score(page):
    text = text_of(page)
    assert "passkey exact_match, 1,024 tokens, n = 50" in text
    assert "full 0.100 ± 0.020 50 as full 0.750" in text
    assert "kivi-2bit 0.000 ± 0.020 40 as full" in text


def test_an_earlier_run_stands_beside_this_one(page):
    text = text_of(page)
    assert "2 methods are in both runs. None changed by more than two standard errors." in text
    assert "xquant-4bit 10.100 10.100 +0.0000 ± 0.0000 0.27 0.27 1.5 1.5" in text
    assert "Not the same in both runs" not in text
    moved = [{**row, "text": "u.txt"} for row in ROWS]
    text = text_of(render_page(ROWS, earlier=moved))
    assert "There are no standard errors" in text
    assert "Not the same in both runs: text u.txt → t.txt." in text
    moved = [{**row, "window_nll": [2.2, 2.4001]} for row in ROWS[:2]]
    text = text_of(render_page(ROWS, earlier=moved))
    assert "Changed by more than two standard errors: full, xquant-4bit." in text


def test_sections_without_data_are_left_out():
    page = render_page(ROWS)
    assert re.findall(r"<h2>(.*?)</h2>", page) == [
        "Loss against compression",
        "Methods",
        "How it was measured",
    ]
