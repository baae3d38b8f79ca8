"""What verbs print on narrow terminals, and into pipes."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

from support.rendered import WIDTHS, check_whole
from xquant.cli import main, tables

PLAN = ("plan", "--shape", "llama-3.1-8b", "--gpu", "h100-pcie")
REPORT = """\
kivi-4bit: 2050 tokens x 1, kernel avx512
  resident      12.77 MB (codes 11.80 MB, scale 430.08 KB, zero 430.08 KB, tail 92.16 KB, index 24.34 KB)"""


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("words", [("methods",), PLAN], ids=" ".join)
def test_no_number_or_name_is_broken(words, width, capsys, monkeypatch):
    def show():
        wide = tables.click.get_current_context().meta[tables.WIDE]
        assert main([*words, *(["--wide"] if wide else [])]) == 0

    check_whole(show, width, capsys, monkeypatch)


def test_lines_break_between_words_and_go_on_below_their_value(capsys, monkeypatch):
    monkeypatch.setattr(tables, "room", lambda: 60)
    tables.say(REPORT)
    assert capsys.readouterr().out == (
        "kivi-4bit: 2050 tokens x 1, kernel avx512\n"
        "  resident      12.77 MB (codes 11.80 MB, scale 430.08 KB,\n"
        "                zero 430.08 KB, tail 92.16 KB, index 24.34\n"
        "                KB)\n"
    )


def test_what_has_no_room_becomes_records(capsys, monkeypatch):
    monkeypatch.setattr(tables, "room", lambda: 22)
    columns = {"method": "left", "cache, MB": "right", "in all, GB": "right", "what it is": "text"}
    rows = [("kivi-4bit", "12,885.7", "31.92", "a text of words"), ("full", "1", "", "short")]
    tables.print_table(columns, rows, extra=("in all, GB",))
    assert capsys.readouterr().out == (
        "kivi-4bit\n"
        "  cache, MB   12,885.7\n"
        "  what it is  a text\n"
        "              of words\n"
        "\n"
        "full\n"
        "  cache, MB   1\n"
        "  what it is  short\n"
        "--wide shows 1 more\n"
        "column: in all, GB\n"
    )


def test_the_width_is_that_of_the_terminal_or_of_columns():
    """As a shell would run it: a terminal of 70 columns, then COLUMNS."""
    for named, width in (("", 70), ("100", 100)):
        ours, its = pty.openpty()
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 70, 0, 0))
        command = [sys.executable, "-m", "xquant.cli", "methods"]
        with subprocess.Popen(command, stdout=its, env={**os.environ, "COLUMNS": named}):
            os.close(its)
            out = b""
            try:
                while more := os.read(ours, 65536):
                    out += more
            except OSError:  # the other side has closed
                pass
        os.close(ours)
        lines = out.decode().replace("\x1b[1m", "").replace("\x1b[0m", "").splitlines()
        assert width - 15 < max(map(len, lines)) <= width


def test_a_pipe_has_every_column(run):
    out = run("methods")[1]
    assert max(map(len, out.splitlines())) > 160
    assert "--wide" not in out
