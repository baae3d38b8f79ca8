"""No file makes a process fall over, or does harm in silence: it is refused in one line, or it works.

`XQUANT_FUZZ=2000` draws so many more files at random for every method. See `support.fuzz_calibrations`.
"""

import json
import os
from pathlib import Path
from typing import Any

from support import fuzz_calibrations
from support.caches import calibration
from support.processes import run

DRAWN = int(os.environ.get("XQUANT_FUZZ", "20"))
MOST_DEATHS = 20


def used(folder: Path) -> list[dict[str, Any]]:
    """Every case with its outcome; a process that dies is followed by another, which goes on after it."""
    found: list[dict[str, Any]] = []
    for _ in range(MOST_DEATHS):
        start = found[-1]["number"] + 1 if found else 0
        ended = run("fuzz_calibrations", str(folder), str(start), str(DRAWN))
        lines = [json.loads(line) for line in ended.stdout.splitlines()]
        found += [line for line in lines if line["outcome"] is not None]
        if lines and lines[-1]["outcome"] is None:
            found.append({**lines[-1], "outcome": f"the process ended with {ended.returncode}"})
        elif ended.returncode == 0:
            break
        else:
            raise RuntimeError(ended.stderr)
    return found


def test_every_changed_file_is_refused_in_one_line_or_works(tmp_path: Path) -> None:
    model = fuzz_calibrations.small_model()
    for spec in fuzz_calibrations.SPECS:
        made = calibration(model, spec)
        assert made is not None
        made.save(fuzz_calibrations.file_of(tmp_path, spec))
    found = used(tmp_path)
    allowed = {True: ("refused", "finite"), False: ("refused",)}
    wrong = [
        f"{case['spec']}, {case['change']}: {case['outcome']}"
        for case in found
        if case["outcome"] not in allowed[case["usable"]]
    ]
    assert not wrong, "\n".join([f"{len(wrong)} of {len(found)}:", *wrong[:30]])
    unchanged = [case["outcome"] for case in found if case["change"] == "nothing"]
    assert unchanged == ["finite"] * len(fuzz_calibrations.SPECS)
    assert len(found) > 4000
