"""The code against docs/architecture.md: who imports whom, and how long a file may be."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from importlinter.cli import lint_imports_command

from xquant.methods import METHODS

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "xquant"
LONGEST = 400
GENERAL = {"METHODS", "LayerCodec", "Method", "Segment"}


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


def special() -> set[str]:
    """Names of classes of one method, its codecs and quantizers."""
    found = {cls.__name__ for cls in METHODS.values()} - {"Full"}
    for folder in ("methods", "quant"):
        for file in (SOURCE / folder).glob("*.py"):
            found |= set(re.findall(r"^class (\w+(?:Codec|Quantizer))\b", file.read_text(), re.M))
    return found | {"Affine", "Codebook", "Plain", "Ranked", "Rematerialized"} - GENERAL


def imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("package", ["analysis", "bench", "cli"])
def test_what_measures_knows_no_method_codec_or_quantizer(package: str) -> None:
    """They ask a method, a codec or a quantizer; so a new one needs no change there."""
    for file in (SOURCE / package).glob("*.py"):
        assert not special() & set(imported(file)), file
