import pytest

from support.word_tokenizer import model_folder
from xquant.cli import main


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(model_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture(autouse=True)
def _no_word_of_torch(monkeypatch):
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
