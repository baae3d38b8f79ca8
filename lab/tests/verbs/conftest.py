import math

import pytest

from support.command_line import model, quiet, run, text
from xquant_lab.verbs import bench_report

__all__ = ["model", "quiet", "run", "text"]


@pytest.fixture(autouse=True)
def no_first_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that took some time are shown at once: on a busy machine these are any."""
    monkeypatch.setattr(bench_report, "FIRST", math.inf)
