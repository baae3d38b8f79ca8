"""Methods that come from outside: by a decorator, from a file, from another distribution."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.models import prompt, tiny
from xquant import Kivi, KVCache, parse_method, register
from xquant.cli import main
from xquant.methods import METHODS, find_installed, load_file
from xquant.runs import code_digest

ROOT = Path(__file__).parents[2]
FP8 = ROOT / "examples" / "fp8.py"
RENAMED = """
from xquant import Kivi, register

@register
class Mine(Kivi):
    name = {!r}
    example = "kivi-mine-4bit"
"""


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What a test registers is gone after it."""
    before, modules = dict(METHODS), set(sys.modules)
    yield
    METHODS.clear()
    METHODS.update(before)
    for name in {*sys.modules} - modules:
        if name.startswith("xquant plugin"):
            del sys.modules[name]
    find_installed.cache_clear()


def test_a_file_is_a_method_in_a_cache_and_in_a_saved_one(tmp_path: Path) -> None:
    load_file(FP8)
    load_file(FP8)
    model, ids = tiny("llama", num_hidden_layers=2, initializer_range=0.05), prompt(1, 150)
    cache, full = KVCache(model, "fp8:group=32,sink=2"), KVCache(model, "full")
    with torch.inference_mode():
        for each in (cache, full):
            model(ids, past_key_values=each)
    assert cache.report().code_bits == 8
    cache.save(tmp_path / "it.safetensors")
    again = KVCache.load(model, tmp_path / "it.safetensors")
    assert again.method.spec == "fp8:sink=2,group=32"
    for mine, exact in zip(again.layers, full.layers, strict=True):
        assert (mine.values - exact.values).norm() < 0.05 * exact.values.norm()


def test_the_page_shows_the_file_and_it_is_short() -> None:
    page = (ROOT / "docs" / "add-a-method.md").read_text()
    first = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert first and first[1] == FP8.read_text()
    assert len(first[1].splitlines()) <= 40


@pytest.mark.parametrize("words", [("--plugin", FP8, "methods"), ("methods", "--plugin", FP8)])
def test_the_command_takes_a_file(words: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    assert main([str(word) for word in words]) == 0
    assert "8-bit floats" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("1 / 0", "fails: ZeroDivisionError"),
        ("import xquant_nothing", "fails: ModuleNotFoundError"),
        ("x = 1", "registers no method"),
        (RENAMED.format("kivi"), "there is a method 'kivi' already"),
        ("from xquant import register\nregister(3)", "derives from xquant.Method"),
        ("from xquant import Method, register\n@register\nclass A(Method): pass", "has no 'name'"),
    ],
)
def test_a_file_that_is_none_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], content: str, words: str
) -> None:
    (tmp_path / "mine.py").write_text(content)
    before = dict(METHODS)
    assert main(["methods", "--plugin", str(tmp_path / "mine.py")]) == 2
    said = capfd.readouterr()
    assert words in said.err and said.err.count("\n") == 1 and not said.out
    assert before == METHODS


def test_a_distribution_brings_a_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name begins as one of ours does; another distribution that fails is named, and does no harm."""
    (tmp_path / "brought.py").write_text(RENAMED.format("kivi-mine"))
    for name, entry in (("good", "kivi-mine = brought"), ("bad", "worse = brought_nothing")):
        folder = tmp_path / f"{name}-1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (folder / "entry_points.txt").write_text(f"[xquant.methods]\n{entry}\n")
    monkeypatch.syspath_prepend(tmp_path)
    find_installed.cache_clear()
    with pytest.warns(RuntimeWarning, match="'worse' of brought_nothing cannot be loaded"):
        method = parse_method("kivi-mine-4bit:sink=3")
    assert (type(method).__name__, method.spec) == ("Mine", "kivi-mine-4bit:sink=3")
    assert type(parse_method("kivi-4bit")) is Kivi


def test_a_method_of_the_laboratory_says_what_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xquant.spec.find_installed", lambda: None)
    METHODS.pop("pyramid", None)  # where the laboratory is installed
    with pytest.raises(ValueError, match=r"of the laboratory, .*: in a clone, pip install \. \./lab"):
        parse_method("pyramid:keep=0.4")


def test_ours_are_found_without_a_look_at_what_is_installed() -> None:
    script = (
        "import sys; from xquant import parse_method; parse_method('kivi-4bit:sink=1')\n"
        "import importlib.metadata as m; m.entry_points = None; parse_method('tc-2bit')"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_results_of_an_edited_file_are_others(tmp_path: Path) -> None:
    before = code_digest()
    file = tmp_path / "mine.py"
    file.write_text(RENAMED.format("kivi-mine"))
    load_file(file)
    first = code_digest()
    file.write_text(file.read_text() + "\n")
    assert len({before, first, code_digest()}) == 3


def test_a_class_may_be_defined_anew() -> None:
    def define() -> type[Kivi]:
        class Anew(Kivi):
            name = "anew"
            example = "anew-4bit"

        return register(Anew)

    first, second = define(), define()
    assert first is not second and type(parse_method("anew-4bit")) is second
