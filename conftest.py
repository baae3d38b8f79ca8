import os

# Before anything imports Triton, whose kernels the tests run without a GPU; XQUANT_TEST_DEVICE=cuda runs
# those of tests/kernels/test_triton*.py on one.
if os.environ.get("XQUANT_TEST_DEVICE", "cpu") == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

# Tiny models lose more time in handing work to threads than they gain.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is marked `long` is left to `make matrix`."""
    if os.environ.get("XQUANT_MATRIX"):
        return
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason="make matrix runs it"))
