import os
from collections import Counter

# Before anything imports Triton, whose kernels the tests run without a GPU; XQUANT_TEST_DEVICE=cuda runs
# those of tests/kernels/test_triton*.py on one.
if os.environ.get("XQUANT_TEST_DEVICE", "cpu") == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

# Tiny models lose more time in handing work to threads than they gain.
torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is marked `long` is left to `make matrix`, and so are the cases of a test marked ``sampled(n)``,
    but the first and every nth after it."""
    cases = Counter[str]()
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled and not item.get_closest_marker("long"):
            test = item.nodeid.partition("[")[0]
            if cases[test] % sampled.args[0]:
                item.add_marker("long")
            cases[test] += 1
        if item.get_closest_marker("long") and not os.environ.get("XQUANT_MATRIX"):
            item.add_marker(pytest.mark.skip(reason="make matrix runs it"))
