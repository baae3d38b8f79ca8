import pytest

from words import model_folder
from xquant.cli import main


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(model_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture
def run(capfd):
    """Run the command in this process: (status, stdout, stderr)."""

    def call(*arguments):
        status = main([str(a) for a in arguments])
        return status, *capfd.readouterr()

    return call
