"""What every form of a cache promises: the table that the tests hold."""

import sys
from pathlib import Path

from .common import table

TESTS = Path(__file__).resolve().parents[2] / "tests"


@table
def forms() -> str:
    """Promises by forms."""
    sys.path.insert(0, str(TESTS))
    from forms.refusals import table as promised

    return promised()
