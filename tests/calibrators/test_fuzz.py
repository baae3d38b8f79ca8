"""No file makes a process fall over, or does harm in silence: it is refused in one line, or it works.

`XQUANT_FUZZ=2000` draws so many more files at random for every method. See `support.fuzz_calibrations`.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from support import fuzz_calibrations
from support.caches import calibration
from support.processes import run

DRAWN = int(os.environ.get("XQUANT_FUZZ", "20"))
MOST_DEATHS = 20


def used(file: Path, spec: str) -> list[dict[str, Any]]:
    """Every case with its outcome; a process that dies is followed by another, which goes on after it."""
    found: list[dict[str, Any]] = []
    for _ in range(MOST_DEATHS):
        start = found[-1]["number"] + 1 if found else 0
        ended = run("fuzz_calibrations", str(file), spec, str(start), str(DRAWN))
        lines = [json.loads(line) for line in ended.stdout.splitlines()]
        found += [line for line in lines if line["outcome"] is not None]
        if lines and lines[-1]["outcome"] is None:
            found.append({**lines[-1], "outcome": f"the process ended with {ended.returncode}"})
        elif ended.returncode == 0:
            break
        else:
            raise RuntimeError(ended.stderr)
    return found


@pytest.mark.long
@pytest.mark.parametrize("spec", fuzz_calibrations.SPECS)
def test_every_changed_file_is_refused_in_one_line_or_works(spec: str, tmp_path: Path) -> None:
    made, file = calibration(fuzz_calibrations.small_model(), spec), tmp_path / "made.safetensors"
    assert made is not None
    made.save(file)
    found = used(file, spec)
    allowed = {True: ("refused", "finite"), False: ("refused",)}
    wrong = [
        f"{case['change']}: {case['outcome']}"
        for case in found
        if case["outcome"] not in allowed[case["usable"]]
    ]
    assert not wrong, "\n".join([f"{len(wrong)} of {len(found)}:", *wrong[:30]])
    assert [case["outcome"] for case in found if case["change"] == "nothing"] == ["finite"]
    assert len(found) > 200
