import math
import statistics

import pytest

from support.result_rows import ENVIRONMENT, compared
from xquant_lab.results.diff import changes, settings

BEFORE = [2.0, 2.5, 3.0]
AFTER = [2.1, 2.4, 3.3]


def run(nll, method="kivi-4bit", **more):
    mean = math.exp(statistics.fmean(nll))
    return compared(method, 1.1, 0.3, perplexity=mean, window_nll=nll, windows=len(nll), **more)


def test_a_change_is_paired_by_window():
    (change,) = changes([run(AFTER)], [run(BEFORE, "full"), run(BEFORE)])
    assert change.method == "kivi-4bit"
    assert change.difference == pytest.approx(0.1)
    ratio = change.now["perplexity"] / change.earlier["perplexity"]
    assert change.difference == pytest.approx(math.log(ratio))
    assert change.error == pytest.approx(statistics.stdev([0.1, -0.1, 0.3]) / math.sqrt(3))
    assert not change.beyond_error


def test_more_than_two_standard_errors_are_told():
    (change,) = changes([run([2.1, 2.6, 3.11])], [run(BEFORE)])
    assert change.beyond_error
    (change,) = changes([run(BEFORE)], [run(BEFORE)])
    assert (change.difference, change.error, change.beyond_error) == (0, 0, False)


@pytest.mark.parametrize("other", [{"text": "u.txt"}, {"model": "n"}, {"context": 1024}, {"windows": 2}])
def test_other_windows_have_a_difference_and_no_error(other):
    (change,) = changes([run(AFTER)], [{**run(BEFORE), **other}])
    assert change.difference == pytest.approx(0.1)
    assert change.error is None and not change.beyond_error


def test_one_window_has_no_error():
    (change,) = changes([run([2.5])], [run([2.0])])
    assert (change.difference, change.error) == (0.5, None)


@pytest.mark.parametrize("broken", [None, math.inf])
def test_what_is_not_finite_has_no_difference(broken):
    (change,) = changes([run(AFTER)], [{**run(BEFORE), "window_nll": [2.0, broken, 3.0]}])
    assert (change.difference, change.error) == (None, None)


def test_methods_of_one_run_only_are_left_out():
    now = [run(AFTER), run(AFTER, "int4")]
    assert [change.method for change in changes(now, [run(BEFORE, "int4")])] == ["int4"]


def test_settings_that_differ_are_named():
    later = run(AFTER, dtype="bfloat16", environment={**ENVIRONMENT, "command": "x", "commit": "d"})
    found = settings(run(BEFORE), later)
    assert found == [("dtype", "float32", "bfloat16"), ("commit", "c0ffee", "d")]
