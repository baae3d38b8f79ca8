"""Decode steps ask for one variant of every kernel, however long they go on: another takes seconds."""

import json
from typing import Any

import pytest

from support.processes import run

pytest.importorskip("triton", minversion="3.6")


pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    done = run("kernel_variants", TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr[-3000:]
    cases: dict[str, dict[str, Any]] = json.loads(done.stdout)
    assert len(cases) == 16
    return cases


def test_there_is_one_variant_of_every_kernel_for_one_layout(
    found: dict[str, dict[str, Any]],
) -> None:
    """Layouts of layers differ, and so do keys and values. A prompt is another shape."""
    assert {count for case in found.values() for count in case["variants"].values()} == {1}


def test_none_is_new_when_the_first_block_is_sealed(found: dict[str, dict[str, Any]]) -> None:
    """With it come the kernels that seal and read blocks, and sinks."""
    assert {name: case["late"] for name, case in found.items() if case["late"]} == {}


def test_a_static_cache_starts_them_with_one_grid(found: dict[str, dict[str, Any]]) -> None:
    """So that a CUDA graph of one step holds for all."""
    for name, case in found.items():
        grids = {case["grids"].get(kernel, 1) for kernel in ("attend", "combine", "append")}
        assert (grids == {1}) == name.startswith("static")


def test_all_kernels_of_decoding_were_started(found: dict[str, dict[str, Any]]) -> None:
    """At every step, or else nothing was seen."""
    each = {"attend", "combine", "append", "attend_exact", "rebuild", "sum_states", "accumulate"}
    assert {kernel for case in found.values() for kernel in case["started"]} == {
        *each,
        "seal",
        "assign",
    }
    for name, case in found.items():
        reads = "attend_exact" if "xquant" in name else "attend"
        assert case["started"][reads] == 400 * (3 if "-cl-" in name else 1)
