import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.examples import examples
from support.result_rows import benched, compared
from xquant_lab.results.front import RATIO, compressed, front, verdict
from xquant_lab.results.labels import write_labels
from xquant_lab.results.plots import NARROW, as_png, as_svg, loss_figure, speed_figure

ROWS = [
    compared("full", 1.0, 1.0),
    compared("xquant-4bit", 1.01, 0.27),
    compared("xquant-2bit:sink=1", 2.0, 0.15),
    compared("kivi-4bit", 1.012, 0.271),
    compared("kivi-2bit", math.inf, 0.14),
    compared("kivi-2bit:sink=1", 1.0, 0.14, kl=None),
]
BENCH = [
    benched("full", 512, 1.0),
    benched("kivi-4bit", 512, 1.1),
    benched("kivi-4bit", 8192, 3.0),
    benched("$a peer_b$", 8192, 0.5, batch=1),
]


def names(rows):
    return [row["method"] for row in rows]


def test_the_full_cache_and_what_is_not_finite_have_no_place_in_the_picture():
    assert names(compressed(ROWS)) == ["xquant-4bit", "xquant-2bit:sink=1", "kivi-4bit"]
    assert names(front(ROWS)) == ["xquant-4bit", "xquant-2bit:sink=1"]


def test_equals_are_on_the_front_together_and_a_tie_in_one_is_decided_by_the_other():
    rows = [compared("kivi-4bit", 1.1, 0.2), compared("xquant-4bit", 1.1, 0.2)]
    assert names(front(rows)) == ["kivi-4bit", "xquant-4bit"]
    assert names(front([*rows, compared("int4", 1.1, 0.19)])) == ["int4"]


# Few values, so that ties come up.
POINTS = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=12)


@given(POINTS)
def test_the_front_is_what_nothing_dominates(points):
    rows = [compared("kivi-4bit", ratio, size / 8) for size, ratio in points]
    found = [(row["cache_ratio"] * 8, row["ratio"]) for row in front(rows)]
    for point in points:
        better = [p for p in points if p != point and p[0] <= point[0] and p[1] <= point[1]]
        assert found.count(point) == (0 if better else points.count(point))
    assert found == sorted(found, key=lambda point: -point[0])
    assert [ratio for _, ratio in found] == sorted(ratio for _, ratio in found)


@pytest.mark.parametrize("rows", [ROWS, ROWS[:2], ROWS[:1], [compared("int4", 1e6, 0.3)]])
def test_the_loss_is_an_svg_and_a_png_and_the_same_every_time(rows):
    svg = as_svg(loss_figure(rows))
    assert svg.startswith("<svg") and svg.rstrip().endswith("</svg>")
    assert as_svg(loss_figure(rows)) == svg
    assert as_png(loss_figure(rows, NARROW)).startswith(b"\x89PNG")


def test_small_losses_are_on_a_linear_axis_and_large_ones_are_not():
    small, large = (loss_figure([compared("kivi-4bit", ratio, 0.3)]).axes[0] for ratio in (1.001, 1.5))
    assert (small.get_yscale(), large.get_yscale()) == ("linear", "function")


def test_what_is_worst_has_a_tick_near_it():
    for worst in (0.005, 0.3, 4.0, 70.0, 1e5):
        axes = loss_figure([compared("kivi-4bit", 1 + worst, 0.3)]).axes[0]
        ticks = [tick for tick in axes.get_yticks() if tick > 0]
        assert worst / 10 <= max(ticks) <= worst * 5
        assert "nan" not in as_svg(axes.figure).lower()


def test_papers_print_perplexity_alone():
    rows = [{"method": m, "ratio": r, "cache_ratio": c} for m, r, c in (("int4", 0.99, 0.3),)]
    assert names(front(rows, RATIO)) == ["int4"]
    (axes,) = loss_figure(rows, measure=RATIO).axes
    assert axes.get_ylabel() == RATIO.label


# It "improves" perplexity by a tenth, and guesses another token than the full cache in most places.
LUCKY = compared("kivi-1bit", 0.903, 0.08, kl=1.9, agreement=0.18)


def test_a_lower_perplexity_than_that_of_the_full_cache_is_not_praised():
    close, far = compared("kivi-4bit", 1.02, 0.27), compared("kivi-2bit", 0.95, 0.27, kl=0.5)
    assert names(front([close, far])) == ["kivi-4bit"]
    assert names(front([close, LUCKY])) == ["kivi-4bit"]
    assert "kivi-1bit" not in verdict([close, LUCKY])
    alone = verdict([LUCKY])
    assert front([LUCKY]) == [] and "kivi-1bit" not in alone and "half of the places" in alone


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (ROWS[:1], "No compressed cache with a finite KL was measured."),
        (
            ROWS[:2],
            "`xquant-4bit`: KL 0.0100, the same top token in 95.0% of places, 27.0% of an fp16 cache.",
        ),
        (
            ROWS[:3],
            "Of 2 compressed caches, 2 are on the Pareto front of size and KL, from `xquant-4bit`",
        ),
        (
            [ROWS[1], ROWS[3]],
            "`xquant-4bit` is both the smallest and the closest to the full cache: KL",
        ),
        (
            [ROWS[1], LUCKY],
            "Of 2 compressed caches, `xquant-4bit` alone keeps the full cache's most",
        ),
        (
            [ROWS[1], ROWS[3], LUCKY],
            "Of 3 compressed caches, 2 of which keep the full cache's most",
        ),
    ],
)
def test_the_verdict_is_computed(rows, sentence):
    assert sentence in verdict(rows)


def test_speed_has_a_panel_a_setting_and_a_tick_a_method():
    figure = speed_figure(BENCH)
    assert [axes.get_title("left") for axes in figure.axes] == ["m, decode, batch 2", "m, decode"]
    ticks = [[label.get_text() for label in axes.get_yticklabels()] for axes in figure.axes]
    assert ticks == [["kivi-4bit"], ["$a peer_b$"]]
    legend = figure.legends[0].get_texts()
    assert [text.get_text() for text in legend] == ["512 tokens", "8,192 tokens"]
    assert as_svg(figure) == as_svg(speed_figure(BENCH))


def labelled(points, on_front):
    """The labels of a picture with these points, and the boxes that they take up."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    figure = Figure(layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(*zip(*points, strict=True), "o")
    write_labels(axes, [(f"kivi-{i}bit:sink=1", point) for i, point in enumerate(points)], on_front)
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    return {note.get_text(): Text.get_window_extent(note, renderer) for note in axes.texts}


@pytest.mark.long
@settings(deadline=None, max_examples=examples(25))
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=12))
def test_labels_do_not_collide(points):
    boxes = list(labelled(points, 2).values())
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:i])


def test_a_crowd_keeps_the_labels_of_the_front():
    crowd = [(0.0, 0.0), (1.0, 1.0)] + [(0.5 + i / 1000, 0.5) for i in range(30)]
    found = labelled(crowd, 2)
    assert {"kivi-0bit:\nsink=1", "kivi-1bit:\nsink=1"} <= set(found)
    assert len(found) < len(crowd)
