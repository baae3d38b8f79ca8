"""The code against docs/architecture.md: who imports whom, and how long a file may be."""

import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner
from importlinter.cli import lint_imports_command

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "xquant"
LONGEST = 400


@pytest.fixture(scope="module")
def layers() -> list[list[str]]:
    """The contract's, top down."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contract = config["tool"]["importlinter"]["contracts"][0]
    return [[name.strip() for name in layer.split("|")] for layer in contract["layers"]]


def test_packages_import_those_below_them() -> None:
    command = ["--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    result = CliRunner().invoke(lint_imports_command, command)
    assert result.exit_code == 0, result.output


def test_the_picture_shows_the_contract(layers: list[list[str]]) -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    picture = text[text.index("```text\n") :].split("```")[1].removeprefix("text\n")
    drawn = [[part.split()[0] for part in line.split("|")] for line in picture.splitlines()]
    assert drawn == layers


@pytest.mark.parametrize("suffix", ["*.py", "*.h", "*.cpp"])
def test_no_file_is_long(suffix: str) -> None:
    long = {
        str(file.relative_to(ROOT)): count
        for folder in (SOURCE, ROOT / "tests", ROOT / "benchmarks")
        for file in folder.rglob(suffix)
        if (count := len(file.read_text().splitlines())) > LONGEST
    }
    assert not long
