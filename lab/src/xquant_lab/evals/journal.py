"""What a long measurement reports while it runs."""

from dataclasses import dataclass, field

from xquant.progress import Progress, silent
from xquant.runs import Runs


@dataclass(frozen=True)
class Journal:
    """Where a measurement keeps what is finished, and whom it tells how far it is."""

    runs: Runs = field(default_factory=lambda: Runs(None, {}))
    """Has what a run that was stopped has finished. Without a folder it keeps nothing."""
    tell: Progress = silent
