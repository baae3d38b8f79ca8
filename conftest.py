import os
from collections import defaultdict
from random import Random

# Before anything imports Triton, whose kernels the tests run without a GPU; XQUANT_TEST_DEVICE=cuda runs
# those of tests/kernels/test_triton*.py on one.
if os.environ.get("XQUANT_TEST_DEVICE", "cpu") == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from hypothesis import settings

from support.examples import examples

# Tiny models lose more time in handing work to threads than they gain.
torch.set_num_threads(1)

# Of properties that do not say on how many examples they are tried.
settings.register_profile("part", max_examples=examples(100))
settings.load_profile("part")

USUAL = 3
"""Cases of a test that `make test` runs."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`make test` runs some cases of every test, which its name draws: `USUAL`, or as many as a mark
    ``cases(n)`` says. The others are marked ``long``, as slow tests are, and left to `make matrix`: they
    are deselected, as thousands that are skipped take a minute to say so."""
    tests = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if not item.get_closest_marker("long"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for name, cases in tests.items():
        mark = cases[0].get_closest_marker("cases")
        count = min(mark.args[0] if mark else USUAL, len(cases))
        drawn = {id(item) for item in Random(name).sample(cases, count)}
        for item in cases:
            if id(item) not in drawn:
                item.add_marker("long")
    if not os.environ.get("XQUANT_MATRIX"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("long")])
        items[:] = [item for item in items if not item.get_closest_marker("long")]
