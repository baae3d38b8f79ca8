import pytest

from words import model_folder
from xquant.cli import main


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(model_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture
def run(capfd):
    """Run the command in this process: (status, stdout, stderr without the lines of progress)."""

    def call(*arguments):
        status = main([str(a) for a in arguments])
        out, err = capfd.readouterr()
        said = (line for line in err.splitlines(keepends=True) if not line.startswith("["))
        return status, out, "".join(said)

    return call
