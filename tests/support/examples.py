"""How many examples a property is tried on."""

import os

SHARE = 4


def examples(most: int) -> int:
    """``most`` in `make matrix`, and a fourth of them in `make test`."""
    return most if os.environ.get("XQUANT_MATRIX") else most // SHARE
