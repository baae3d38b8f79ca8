"""What is refused, or warned of, before a model is loaded."""

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from click.testing import CliRunner

from support.vllm_engines import answers, configured, connector, engine, save_tiny
from xquant.cli.plan import plan


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What the plugin logs; vLLM lets nothing of it reach the root."""
    from vllm.logger import init_logger  # whose import takes the handlers of loggers that are there

    logger = init_logger("vllm.xquant")
    logger.addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, logger.name):
        yield caplog
    logger.removeHandler(caplog.handler)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"xquant_attend": "store"}, "no method"),
        ({"xquant": None}, "no method"),
        ({"xqaunt": "kivi-4bit"}, "no option 'xqaunt'"),
        ({"XQuant": "kivi-4bit"}, "no option 'XQuant'"),
        ({"x-quant": "kivi-4bit"}, "no option 'x-quant'"),
        ({"xquants": "kivi-4bit"}, "no option 'xquants'"),
        ({"xqant_attend": "store"}, "no option 'xqant_attend'"),
        ({"xquant": "kivi-4bit", "xquant_atend": "store"}, "no option 'xquant_atend'"),
        ({"xquant": "kivi-4bit", "xquant-attend": "store"}, "no option 'xquant-attend'"),
    ],
)
def test_keys_that_would_be_passed_over_are_refused(options: dict[str, Any], why: str, tiny: Path) -> None:
    with pytest.raises(ValueError, match=f"^xquant: {why}"):
        configured(tiny, additional_config=options)


def test_keys_of_others_are_theirs(tiny: Path) -> None:
    for options in ({}, {"quant": "kivi-4bit"}, {"xformers": True}, {"x": 1}, {"expert_map": "quant"}):
        assert configured(tiny, additional_config=options).additional_config == options
        both = {**options, "xquant": "kivi-4bit"}
        assert configured(tiny, additional_config=both).cache_config.block_size == 128


@pytest.mark.parametrize("path", ["file", "file/in", "/proc/none", "read-only"])
def test_a_folder_that_cannot_be_used_is_refused(
    path: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    if path == "read-only":
        monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ValueError, match=r"^xquant: the connector.s folder .* cannot be used: ") as refused:
        configured(tiny, additional_config={"xquant": "kivi-4bit"}, **connector(tmp_path / path))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", None])
def test_a_plan_takes_the_dtype_that_vllm_takes(dtype: str | None, tiny: Path, tmp_path: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
    asked = [str(tmp_path), "--engine", "vllm", "--memory", "1", "--json", "-"]
    [row, *_] = json.loads(CliRunner().invoke(plan, asked, catch_exceptions=False).stdout)
    assert str(configured(tmp_path, dtype="auto").model_config.dtype) == f"torch.{row['dtype']}"


def test_recent_tokens_that_take_most_of_the_room_are_told(
    tiny: Path, told: pytest.LogCaptureFixture
) -> None:
    for spec, found in (("kivi-4bit", False), ("kivi-4bit:tail=128", False), ("kivi-4bit:tail=5000", True)):
        told.clear()
        configured(tiny, additional_config={"xquant": spec})
        assert ("tail=5000 and 0 drafts leave room" in told.text) == found


def test_an_engine_says_what_it_does(tiny: Path, told: pytest.LogCaptureFixture) -> None:
    with engine(tiny, "kivi-4bit") as llm:
        answers(llm, [[1, 2, 3]], 1)
    lines = {text for text in told.messages if text.startswith("xquant: kivi-4bit in 4 layers, read by ")}
    assert len(lines) == 1
    assert " times the tokens of vLLM in requests of 1,024. not compressed: " in lines.pop()
