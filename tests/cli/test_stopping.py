"""Ctrl-C and SIGTERM: one line that says how to go on, and status 130."""

import json
import os
import signal
import time
from importlib import import_module

import pytest

from support.word_tokenizer import text_of
from xquant.runs import Runs

AGAIN = "with --resume DIR keeps what it has finished"


@pytest.fixture
def text(tmp_path):
    (tmp_path / "t.txt").write_text(text_of(3000))
    return tmp_path / "t.txt"


def stop(*_, **__):
    raise KeyboardInterrupt


RESUMED = [
    ("perplexity", "m --method full --text TEXT"),
    ("compare", "m --text TEXT --output OUT"),
    ("eval", "m --method full --task passkey"),
    ("reproduce", "xquant/table1 m --text TEXT"),
    ("calibrate", "m --method kvquant-3bit-1% --output OUT"),
    ("bench", "m"),
]


@pytest.mark.parametrize(("verb", "arguments"), RESUMED)
def test_a_verb_with_resume_says_how_to_go_on(run, monkeypatch, text, tmp_path, verb, arguments):
    monkeypatch.setattr("xquant.load_model", stop)
    places = {"TEXT": text, "OUT": tmp_path / "out"}
    words = [verb, *(places.get(word, word) for word in arguments.split())]
    status, out, err = run(*words)
    assert (status, out, err.count("\n")) == (130, "", 1)
    assert AGAIN in err
    status, out, err = run(*words, "--resume", tmp_path / "kept")
    assert (status, out, err.count("\n")) == (130, "", 1)
    assert err == (
        f"xquant: stopped; the same command goes on from what is finished in '{tmp_path / 'kept'}'\n"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        "generate m --prompt w2",
        "calibrate m --method kvquant-3bit-1% --text TEXT --output OUT",  # nothing is written
    ],
)
def test_others_say_that_nothing_was_kept(run, monkeypatch, text, tmp_path, arguments):
    monkeypatch.setattr("xquant.load_model", stop)
    places = {"TEXT": text, "OUT": tmp_path / "out"}
    assert run(*(places.get(word, word) for word in arguments.split())) == (
        130, "", "xquant: stopped; nothing was kept\n",
    )  # fmt: skip


def test_an_interrupt_while_the_command_is_imported(run, monkeypatch):
    monkeypatch.setattr(import_module("xquant.cli.app"), "run", stop)
    assert run("methods") == (130, "", "xquant: stopped; nothing was kept\n")


def test_a_request_to_end_is_a_stop(run, monkeypatch):
    def ask(*_, **__):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)  # ended by the signal

    monkeypatch.setattr("xquant.load_model", ask)
    before = signal.getsignal(signal.SIGTERM)
    assert run("generate", "m", "--prompt", "w2") == (130, "", "xquant: stopped; nothing was kept\n")
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture
def interruptible():
    """Ctrl-C stops this process, which it does not in what a shell runs behind."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_run_stopped_by_a_signal_goes_on_from_its_parts(run, monkeypatch, model, text, tmp_path):
    kept, save = tmp_path / "kept", Runs.save

    def save_and_stop(*part):
        save(*part)
        os.kill(os.getpid(), signal.SIGINT)

    asked = ["perplexity", model, "--method", "kivi-4bit:group=8", "--text", text]
    asked += ["--context", 16, "--windows", 3, "--device", "cpu", "--json", "-"]
    asked += ["--resume", kept]
    with monkeypatch.context() as patched:
        patched.setattr(Runs, "save", save_and_stop)
        status, out, err = run(*asked)
    assert (status, out) == (130, "")
    assert err.splitlines()[-1] == (
        f"xquant: stopped; the same command goes on from what is finished in '{kept}'"
    )
    assert "Traceback" not in err
    (part,) = kept.rglob("*.json")
    written = part.stat().st_mtime_ns
    status, out, _ = run(*asked)
    (row,) = json.loads(out)
    assert (status, row["windows"]) == (0, 3)
    assert len(list(kept.rglob("*.json"))) == 6  # of the full cache too
    assert part.stat().st_mtime_ns == written
