"""The scripts in benchmarks/: what they import from the package is there, and tables are what results say."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
SCRIPTS = sorted(BENCHMARKS.rglob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_what_a_script_imports_is_there(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("xquant"):
            if "triton.jit" in str(node.module):
                pytest.importorskip("triton", minversion="3.5")
            if str(node.module).startswith("xquant.serve.vllm"):
                pytest.importorskip("vllm")
            module = importlib.import_module(str(node.module))
            for name in node.names:
                if not hasattr(module, name.name):
                    importlib.import_module(f"{node.module}.{name.name}")


def check_tables() -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "tables.py"), "--check"]
    return subprocess.run(command, capture_output=True, text=True)


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
