"""Fixtures and a check for tests of the command ``xquant``; a ``conftest.py`` imports the fixtures."""

import os

import pytest

from support.word_tokenizer import model_folder, text_of
from xquant.cli import main


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(model_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture
def text(tmp_path):
    (tmp_path / "t.txt").write_text(text_of(100))
    return str(tmp_path / "t.txt")


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Heads of the tiny model are read by no kernel, which is said once a process."""
    monkeypatch.setattr("xquant.kernels.choose._warn", lambda why: None)


@pytest.fixture
def run(capfd):
    """Run the command in this process: (status, stdout, stderr without the lines of progress)."""

    def call(*arguments):
        status = main([str(a) for a in arguments])
        out, err = capfd.readouterr()
        said = (line for line in err.splitlines(keepends=True) if not line.startswith("["))
        return status, out, "".join(said)

    return call


def check_refused(run, model, text, folder, arguments, message):
    """By one line on standard error, and nothing is left in ``folder``."""
    places = {"MODEL": model, "TEXT": text, "TMP": str(folder)}
    places |= {"NONE": str(folder / "none"), "OUT": str(folder / "out")}
    words = []
    for word in arguments.split():
        head, slash, rest = word.partition("/")
        words.append(places.get(head, head) + slash + rest)
    status, out, err = run(*words)
    assert (status, out) == (2, "")
    assert err.startswith("xquant: ")
    assert message in err
    assert err.count("\n") == 1
    assert os.listdir(folder) == ["t.txt"]
