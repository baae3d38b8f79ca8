"""Lines of progress where nobody watches, on stderr, and bars where somebody does."""

import io
import json

import pytest

from support.word_tokenizer import text_of
from xquant.cli import main, progress
from xquant.cli.common import load
from xquant.cli.progress import EVERY, FIRST, Lines, spoken


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def lines():
    """Lines, their clock and their stream."""
    clock, stream = Clock(), io.StringIO()
    return Lines("calibrating m", stream, clock), clock, stream


def test_a_stage_begins_with_a_line_and_tells_its_time_once_a_part_is_done(lines):
    show, clock, stream = lines[0].show, *lines[1:]
    show(0, 10, "writing texts")
    assert stream.getvalue() == "[0:00] calibrating m, writing texts\n"
    clock.now += 2 * FIRST
    show(0, 10, "writing texts")  # nothing is done: nothing is known
    assert stream.getvalue().count("\n") == 1
    clock.now += 50
    show(1, 10, "writing texts")
    assert stream.getvalue().endswith("[1:00] calibrating m, writing texts: 1 of 10, about 9 min left\n")
    show(0, 4, "pass 1")
    assert stream.getvalue().endswith("[1:00] calibrating m, pass 1\n")
    clock.now += 2 * FIRST
    show(2, 4, "pass 1")
    assert stream.getvalue().endswith("calibrating m, pass 1: 2 of 4, about 10 s left\n")
    show(0, 4, "pass 2")
    assert stream.getvalue().endswith("calibrating m, pass 2\n")
    lines[0].end()
    assert stream.getvalue().endswith("[1:10] calibrating m, done\n")


def test_further_lines_are_half_a_minute_apart(lines):
    show, clock, stream = lines[0].show, *lines[1:]
    for second in range(601):
        show(second, 600, "passing time")
        clock.now += 1
    assert stream.getvalue().count("\n") == 1 + 1 + int((599 - FIRST) // EVERY)


def test_parts_that_a_run_before_has_finished_do_not_count_for_the_time(lines):
    show, clock, stream = lines[0].show, *lines[1:]
    show(5, 10, "going on")
    clock.now += 20
    show(6, 10, "going on")
    assert "6 of 10, about 80 s left" in stream.getvalue()


def test_work_that_never_began_is_not_said_to_be_done(lines):
    lines[0].end()
    assert lines[2].getvalue() == ""


def test_times_as_they_are_said():
    assert [spoken(s) for s in (0.4, 89, 100, 5000, 7200)] == [
        "0 s", "89 s", "2 min", "83 min", "2.0 h",
    ]  # fmt: skip


COMMANDS = {
    "measuring perplexity, full": "perplexity MODEL --method int4 --text TEXT --context 40 --windows 1",
    "running tasks, full, 200 tokens": "eval MODEL --method int4 --task passkey --context 200 --limit 1",
    "timing 12 tokens, batch 1, filling full, float32 sdpa": "bench MODEL --method int4 --context 12"
    " --rounds 1",
    "writing with int4, up to 3 tokens": "generate MODEL --method int4 --prompt w2 --max-new-tokens 3",
    "measuring xquant/figure3, reading the text": "reproduce xquant/figure3 MODEL --text TEXT"
    " --context 32 --windows 1",
    "calibrating kvquant-2bit-1%, writing texts": "calibrate MODEL --method kvquant-2bit-1% --context 20"
    " --windows 3 --output OUT",
}


@pytest.mark.parametrize("first", COMMANDS)
def test_every_long_verb_says_on_stderr_what_it_does(model, tmp_path, capfd, first):
    (tmp_path / "t.txt").write_text(text_of(100))
    places = {"MODEL": model, "TEXT": str(tmp_path / "t.txt"), "OUT": str(tmp_path / "out")}
    words = [places.get(word, word) for word in COMMANDS[first].split()]
    assert main([*words, "--device", "cpu", "--json", "-"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)
    assert err.splitlines()[0] == f"[0:00] {first}"
    assert all(line.startswith("[") for line in err.splitlines())
    assert err.splitlines()[-1].endswith(", done")


def watched(monkeypatch):
    """Standard error as if somebody watched."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    return stream


def test_while_a_model_is_loaded_there_is_one_bar(monkeypatch, model):
    stream = watched(monkeypatch)
    load(model, "float32", "cpu")
    assert "loading" in stream.getvalue() and "Loading weights" not in stream.getvalue()


def test_on_a_terminal_there_is_a_bar_and_no_line(monkeypatch):
    stream = watched(monkeypatch)
    with progress.progress("measuring") as show:
        show(1, 4, "kivi-4bit")
    assert "kivi-4bit" in stream.getvalue() and "1/4" in stream.getvalue()
    assert "measuring" not in stream.getvalue()


def test_work_that_fails_is_not_said_to_be_done(capfd):
    with pytest.raises(ValueError, match="no"), progress.progress("measuring") as show:
        show(0, 2, "one")
        raise ValueError("no")
    assert capfd.readouterr().err == "[0:00] measuring, one\n"
