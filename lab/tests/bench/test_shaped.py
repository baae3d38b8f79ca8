"""Random calibrations are ones that methods take."""

import pytest
import torch

from xquant.calibration import Expected
from xquant_lab.bench.shaped import random_tensor


@pytest.mark.parametrize(
    "wanted",
    [
        Expected((2, 3), torch.float16, least=-4, most=4, rising=True),
        Expected((7,), torch.int16, -3, 3),
        Expected((40, 9), torch.float32, least=0, most=0.125),
    ],
)
def test_random_numbers_fit(wanted: Expected) -> None:
    found = random_tensor(wanted)
    assert wanted.fault(found) == "" and not found.is_meta
    assert bool(found.any()) == (len(wanted.shape) > 1)
