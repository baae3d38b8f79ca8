"""What the package says of itself, in the places that say it."""

import re
import subprocess
import sys
from importlib import metadata, resources
from pathlib import Path

import pytest

import xquant

ROOT = Path(__file__).parent.parent


def test_every_place_names_one_version() -> None:
    versions = {metadata.version(name) for name in ("xquant-kv", "xquant-lab", "xquant-vllm")}
    assert versions == {xquant.__version__}
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    logged = re.search(r"^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert cited and logged and cited[1] == logged[1] == xquant.__version__


def test_it_is_installed_as_typed() -> None:
    assert resources.files("xquant").joinpath("py.typed").is_file()


def test_importing_it_waits_for_nothing_else() -> None:
    script = (
        "import sys, xquant\n"
        "assert xquant.__version__\n"
        "assert not {'torch', 'transformers', 'importlib.metadata'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-S", "-c", script], check=True, cwd=ROOT / "src")


@pytest.mark.parametrize(
    ("distribution", "extras"),
    [
        ("xquant-kv", {"cli", "calibrate", "entropy", "smollm2"}),
        ("xquant-lab", {"plots", "eval"}),
    ],
)
def test_all_is_every_extra_and_nothing_of_developers(distribution: str, extras: set[str]) -> None:
    named = metadata.metadata(distribution).get_all("Provides-Extra") or []
    assert {*named} == extras | {"all"}
    needed = metadata.requires(distribution) or []
    developers = {"pytest", "ruff", "mypy", "triton", "mkdocs-material", "ipykernel"}
    assert not {re.split(r"[^\w-]", line)[0] for line in needed} & developers
    every = [line for line in needed if re.search("extra == .all.", line)]
    if every[0].startswith(distribution):  # as it is written; some build backends resolve it
        assert {*re.findall(r"[\w-]+", every[0].partition("[")[2].partition("]")[0])} == extras
    else:
        optional = {line.partition(";")[0].strip() for line in needed if "extra ==" in line}
        assert {line.partition(";")[0].strip() for line in every} == optional


def test_the_library_alone_has_its_own_verbs_and_says_where_others_are() -> None:
    """As where only ``pip install '.[cli]'`` was run: no distribution adds a verb."""
    script = """
import importlib.metadata, sys
importlib.metadata.entry_points = lambda **_: importlib.metadata.EntryPoints()
from xquant.cli import main
assert main(["--help"]) == 0
assert main(["perplexity", "smollm2"]) == 2
assert not any(name.startswith(("xquant_lab", "torch")) for name in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout and "perplexity" not in done.stdout
    (line,) = done.stderr.splitlines()
    assert line.endswith("in a clone, pip install . ./lab")
