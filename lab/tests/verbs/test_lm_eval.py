"""`xquant lm-eval`: lm-eval's own command, which knows our model type."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.lm_eval_data import choices, harness_folder

pytest.importorskip("lm_eval")
import lm_eval.__main__
import lm_eval.tasks
from lm_eval.api.registry import get_model

from xquant_lab.evals.harness import XQuantLM
from xquant_lab.verbs.lm_eval import register


@pytest.fixture
def only_our_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval's whole index takes ten seconds."""
    quick = partial(lm_eval.tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", quick)


def asked(folder: Path, method: str, tasks: Path, *more: Any) -> tuple[Any, ...]:
    arguments = f"pretrained={folder},method={method}"
    return (
        *("lm-eval", "--model", "xquant", "--model_args", arguments, "--device", "cpu"),
        *("--tasks", "choices", "--include_path", tasks, *more),
    )


def test_a_task_is_scored_with_a_compressed_cache(run: Any, tmp_path: Path, only_our_tasks: None) -> None:
    model = harness_folder(tmp_path / "model")
    tasks = choices(tmp_path / "tasks").parent
    words = asked(model, "kivi-2bit:group=8", tasks, "--output_path", tmp_path / "out")
    before = sys.argv
    status, out, _ = run(*words)
    assert status == 0 and "choices" in out
    (file,) = (tmp_path / "out").rglob("results_*.json")
    config = json.loads(file.read_text())["config"]
    assert config["model"] == "xquant" and config["model_args"]["method"] == "kivi-2bit:group=8"
    assert sys.argv is before


def test_what_is_ours_to_refuse_is_one_line(
    run: Any, tmp_path: Path, only_our_tasks: None, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = choices(tmp_path / "tasks").parent
    status, _, err = run(*asked(tmp_path, "nonsense", tasks))
    assert status == 2
    assert [line for line in err.splitlines() if line.startswith("xquant:")] == [err.splitlines()[-1]]
    assert "unknown method 'nonsense'" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "passed"),
    [
        (("--help",), ["--help"]),
        ((), ["--help"]),
        (("ls", "tasks", "-h"), ["ls", "tasks", "-h"]),
        (("--model", "hf", "--limit=2", "-x"), ["--model", "hf", "--limit=2", "-x"]),
    ],
)
def test_all_words_are_lm_evals_own(
    run: Any, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], passed: list[str]
) -> None:
    seen = []
    monkeypatch.setattr(lm_eval.__main__, "cli_evaluate", lambda: seen.append(sys.argv))
    assert run("lm-eval", *words)[0] == 0
    assert seen == [["lm-eval", *passed]]


def test_the_model_type_is_there_beside_lm_evals_own() -> None:
    register()
    assert get_model("xquant") is XQuantLM
    assert get_model("hf").__name__ == "HFLM"


def test_registering_imports_nothing_that_is_not_asked_for() -> None:
    script = (
        "import sys; from xquant_lab.verbs.lm_eval import register; register(); register()\n"
        "from lm_eval.api.registry import model_registry\n"
        "assert 'xquant' in model_registry and 'hf' in model_registry\n"
        "assert not {'torch', 'xquant_lab.evals.harness'} & {*sys.modules}\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_without_lm_eval_it_says_what_to_install(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    status, out, err = run("lm-eval", "--model", "xquant")
    assert (status, out) == (2, "")
    assert err == "xquant: lm_eval is missing: in a clone, pip install './lab[eval]'\n"
