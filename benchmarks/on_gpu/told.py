"""A plugin of pytest: outcomes are written down one by one, with the reason of a failure, so that a run that
is cut short has told all it knows. One case of every test runs first, then the second of each, and so on."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from xquant.results import stamp, write_json


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--told", type=Path, required=True, help="The file to write to.")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    before: Counter[str] = Counter()
    turn = {}
    for item in items:
        test = item.nodeid.partition("[")[0]
        turn[item] = before[test]
        before[test] += 1
    items.sort(key=turn.__getitem__)


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:  # a worker's reports come to the process that started it
        config.pluginmanager.register(_Told(config.getoption("--told")))


class _Told:
    """Outcomes so far."""

    def __init__(self, file: Path) -> None:
        self._file, self._rows = file, list[dict[str, Any]]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        self._rows.append(
            {
                "test": report.nodeid,
                "outcome": report.outcome,
                "seconds": report.duration,
                "error": crash.message[:500] if crash else None,
                "where": f"{crash.path}:{crash.lineno}" if crash else None,
            }
        )
        write_json(self._file, stamp(self._rows))
        if report.failed:
            print(f"\n{report.nodeid}\n{report.longreprtext}", flush=True)
