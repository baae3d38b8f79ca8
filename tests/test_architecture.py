"""The code against docs/architecture.md: who imports whom, how long files are, and what calls name."""

import ast
import tomllib
from pathlib import Path

import networkx
import pytest
from click.testing import CliRunner
from importlinter.cli import lint_imports_command

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "xquant"
LONGEST = 400
MADE = {
    "arange",
    "as_tensor",
    "empty",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
}
MADE |= {"tensor", "zeros"}
"""torch's functions that make a tensor on the default device, if no device is named."""
FLOATS = {"empty", "eye", "linspace", "ones", "rand", "randn", "zeros"}
"""Those of them that make one of the default dtype."""


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
    picture = text[text.index("```text\ncli ") :].split("```")[1].removeprefix("text\n")
    drawn = [[part.split()[0] for part in line.split("|")] for line in picture.splitlines()]
    assert drawn == layers


@pytest.mark.parametrize("suffix", ["*.py", "*.h", "*.cpp"])
def test_no_file_is_long(suffix: str) -> None:
    long = {
        str(file.relative_to(ROOT)): count
        for folder in (SOURCE, *map(ROOT.joinpath, ("lab", "vllm-plugin", "tests", "benchmarks")))
        for file in folder.rglob(suffix)
        if (count := len(file.read_text().splitlines())) > LONGEST
    }
    assert not long


def test_every_tensor_says_where_it_is() -> None:
    """What a user sets as the default device or dtype is not ours to take: each call names its own."""
    silent = []
    for file in [*SOURCE.rglob("*.py"), *(ROOT / "lab" / "src").rglob("*.py")]:
        for call in (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)):
            module, _, name = ast.unparse(call.func).rpartition(".")
            said = {keyword.arg for keyword in call.keywords}
            wanted = {"device", "dtype"} if name in FLOATS else {"device"}
            if module == "torch" and name in MADE and None not in said and wanted - said:
                silent.append(f"{file.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call)}")
    assert not silent


def _imported(file: Path, modules: dict[str, Path]) -> set[str]:
    """The modules that a file names in its imports, those for types alone included."""
    home = [*file.relative_to(SOURCE.parent).parent.parts]
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*home[: len(home) - node.level + 1], *(node.module or "").split(".")]
            package = ".".join(filter(None, base))
            found |= {f"{package}.{each.name}" for each in node.names} | {package}
    return found & modules.keys()


def test_no_circle_has_more_than_three_files() -> None:
    """Files that name each other can only be read together. What a package gathers in its ``__init__`` is
    left out: whoever imports a part of it imports that first, whatever stands there."""
    modules = {
        ".".join(file.relative_to(SOURCE.parent).with_suffix("").parts): file
        for file in SOURCE.rglob("*.py")
        if file.name != "__init__.py"
    }
    graph = networkx.DiGraph()
    for name, file in modules.items():
        graph.add_edges_from((name, other) for other in _imported(file, modules) - {name})
    circles = [sorted(each) for each in networkx.strongly_connected_components(graph)]
    assert not [each for each in circles if len(each) > 3]


MOST_PARAMETERS = 8
MOST_OF_A_KERNEL = 15
"""Parameters of a function of Triton, but for its constants."""
TAKE_MORE = {
    "src/xquant/calibrators/run.py: calibrate": "is public: callers give its options by name",
    "vllm-plugin/src/xquant_vllm/seam.py: __init__": "has the signature that vLLM calls",
}
"""Functions that take more, each with the reason."""


def _takes_many(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it has more named parameters than it may. A command's are the options that click gives it."""
    marks = [ast.unparse(mark).partition("(")[0] for mark in function.decorator_list]
    if "click.command" in marks:
        return False
    asked = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
    asked = [each for each in asked if each.arg not in ("self", "cls")]
    if "triton.jit" not in marks:
        return len(asked) > MOST_PARAMETERS
    constants = sum("constexpr" in ast.unparse(each.annotation or each) for each in asked)
    return len(asked) - constants > MOST_OF_A_KERNEL


def test_no_function_takes_many_parameters() -> None:
    """What belongs together is a dataclass, or for Triton a NamedTuple, and takes one."""
    many = {
        f"{file.relative_to(ROOT)}: {node.name}"
        for folder in (SOURCE, ROOT / "lab" / "src", ROOT / "vllm-plugin" / "src")
        for file in folder.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _takes_many(node)
    }
    assert many == TAKE_MORE.keys()
