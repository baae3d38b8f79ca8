"""The scripts in benchmarks/: what they import from the package is there, and tables are what results say."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.models import tiny
from xquant import KVCache, parse_method

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
SCRIPTS = sorted(BENCHMARKS.rglob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_what_a_script_imports_is_there(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("xquant"):
            if "triton.jit" in str(node.module):
                pytest.importorskip("triton", minversion="3.5")
            if str(node.module).startswith("xquant_lmcache"):
                pytest.importorskip("lmcache")
            if str(node.module).startswith("xquant_vllm"):
                pytest.importorskip("vllm")
            module = importlib.import_module(str(node.module))
            for name in node.names:
                if not hasattr(module, name.name):
                    importlib.import_module(f"{node.module}.{name.name}")


def check_tables() -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "tables.py"), "--check"]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.long
def test_tables_are_what_the_results_say() -> None:
    found = check_tables()
    assert found.returncode == 0, found.stdout + found.stderr


def test_a_stale_table_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    tables = importlib.import_module("tables")
    page = "before\n<!-- table: peak-memory -->\n| old |\n<!-- end -->\nafter\n"
    written = tables.filled(page)
    assert "DynamicCache" in written and "| old |" not in written
    assert tables.filled(written) == written
    with pytest.raises(ValueError, match="no table 'nothing'"):
        tables.filled("<!-- table: nothing -->\n<!-- end -->")


def test_positions_are_in_ranges_that_double(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    used = importlib.import_module("used")
    assert list(used.ranges(512)) == ["0-63", "64-127", "128-255", "256-511"]
    assert used.ranges(80) == {"0-63": slice(0, 64), "64-79": slice(64, 80)}
    assert used.ranges(16) == {"0-15": slice(0, 16)}


def test_first_differences_count_the_tokens_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    used = importlib.import_module("used")
    wanted = torch.tensor([[5, 6, 7], [5, 6, 7], [5, 6, 7]])
    chosen = torch.tensor([[5, 6, 7], [5, 9, 7], [8, 6, 7]])
    assert used.first_differences(chosen, wanted) == [3, 1, 0]


def test_first_differences_are_those_of_free_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    used = importlib.import_module("used")
    model = tiny("llama")
    prompts = [torch.randint(2, 100, (3, 40), generator=torch.Generator().manual_seed(0))]
    reference = used.continued(model, prompts, 24)
    method = parse_method("kivi-2bit:group=8")

    def make() -> KVCache:
        return KVCache(model, method)

    row = used.measured(model, prompts, reference, used.Entry(make, "", method))
    one_by_one = used.measured(model, prompts, reference, used.Entry(make, ""))
    free = used.continued(model, prompts, 24, make()).tokens
    assert row["first_difference"] == used.first_differences(free[:, 0], reference.tokens[:, 0])
    assert min(row["first_difference"]) < 24 and row["kl"] > 0
    assert one_by_one["first_difference"] == row["first_difference"]
    assert one_by_one["kl"] == pytest.approx(row["kl"], rel=1e-3)
    assert one_by_one["cache_ratio"] == pytest.approx(row["cache_ratio"], rel=1e-3)
    apart = used.edit_distances(model, prompts, reference, used.Entry(make, ""), row)
    for first, distance, own, other in zip(
        row["first_difference"], apart, free[:, 0], reference.tokens[:, 0], strict=True
    ):
        assert (distance > 0) == (first < 24)
        assert distance <= int((own != other).sum())  # putting in and leaving out may cost less
    entry = used.entry_of(model, None, "full>kivi-2bit:group=8")
    assert isinstance(entry.make(), KVCache) and entry.name == "full>kivi-2bit:group=8"
    converted = used.measured(model, prompts, reference, entry)
    assert converted["kl"] > 0 and converted["bits_per_value"] == row["bits_per_value"]
    full = used.measured(model, prompts, reference, used.entry_of(model, None, "full"))
    assert full["never_differs"] == 3 and full["kl"] < 1e-5


def test_turns_of_a_conversation_go_through_one_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    used = importlib.import_module("used")
    model = tiny("llama")
    prompts = list(torch.randint(2, 100, (3, 2, 12), generator=torch.Generator().manual_seed(0)))
    reference = used.continued(model, prompts, 9)
    assert reference.tokens.shape == (2, 3, 9)
    said = [t for turn in range(3) for t in (prompts[turn], reference.tokens[:, turn])]
    with torch.inference_mode():
        whole = model(torch.cat(said, 1)).logits.argmax(-1)
    for turn in range(3):
        end = (turn + 1) * (12 + 9)
        assert torch.equal(whole[:, end - 10 : end - 1], reference.tokens[:, turn])
    full = used.measured(model, prompts, reference, used.entry_of(model, None, "full"))
    packed = used.measured(model, prompts, reference, used.entry_of(model, None, "kivi-2bit:group=8"))
    assert full["never_differs"] == 6 and full["kl"] < 1e-5
    assert len(packed["kl_by_turn"]) == 3 and min(packed["kl_by_turn"]) > 0
