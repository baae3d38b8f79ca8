"""Files that appear whole or not at all: modes, links, threads, and processes that are killed."""

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.models import tiny
from xquant import Calibration, KVCache
from xquant.files import replacing, workplace, write_atomically
from xquant.results import write_json
from xquant.runs import Runs

Write = Callable[[Path], None]


def save_cache(path: Path) -> None:
    KVCache(tiny("llama", num_hidden_layers=2), "kivi-4bit:group=8").save(path)


def save_calibration(path: Path) -> None:
    Calibration({"0.a": torch.ones(2)}, "m", "0", "t", "0.1.0").save(path)


WRITERS: dict[str, Write] = {
    "text": lambda path: write_atomically(path, "a text"),
    "results": lambda path: write_json(path, [{"a": 1}]),
    "calibration": save_calibration,
    "cache": save_cache,
}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_file_keeps_its_mode_and_a_new_one_has_that_of_any(write: Write, tmp_path: Path) -> None:
    file, plain = tmp_path / "file", tmp_path / "plain"
    plain.touch()
    write(file)
    assert mode(file) == mode(plain)
    for kept in (0o600, 0o640, 0o666, 0o400):
        file.chmod(kept)
        write(file)
        assert mode(file) == kept
    assert sorted(tmp_path.iterdir()) == [file, plain]


def test_what_replaces_a_file_of_its_owner_is_never_read_by_others(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch(0o600)
    with replacing(file) as temporary:
        assert mode(temporary) == 0o600


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_links_that_go_in_a_circle_are_replaced(write: Write, tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to(tmp_path / "two")
    (tmp_path / "two").symlink_to(tmp_path / "one")
    write(tmp_path / "one")
    assert (tmp_path / "one").is_file()


def test_threads_that_write_one_file(tmp_path: Path) -> None:
    errors: list[BaseException] = []
    contents = [str(number) * 99_999 for number in range(3)]

    def write(content: str) -> None:
        try:
            for _ in range(50):
                write_atomically(tmp_path / "file", content)
                assert (tmp_path / "file").read_text() in contents
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert os.listdir(tmp_path) == ["file"]


KILLED = """
import os, signal, sys
from pathlib import Path
from xquant.files import replacing
with replacing(Path(sys.argv[1])) as temporary:
    temporary.write_bytes(bytes(1 << 20))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_leaves_is_removed_by_the_next_that_writes(tmp_path: Path) -> None:
    file = tmp_path / "file"
    assert subprocess.run([sys.executable, "-c", KILLED, file]).returncode == -9
    assert len(os.listdir(tmp_path)) == 1 and not file.exists()
    with workplace(tmp_path) as working:  # another that is at work stays
        (working / "begun").touch()
        write_atomically(tmp_path / "other", "a text")
        assert (working / "begun").exists()
    assert os.listdir(tmp_path) == ["other"]


def test_what_others_write_beside_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / ".other.tmp").touch()
    write_atomically(tmp_path / "file", "a text")
    assert (tmp_path / ".other.tmp").exists()


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    def fail(temporary: Path) -> Any:
        temporary.write_text("half")
        raise KeyboardInterrupt

    write_atomically(tmp_path / "file", "a text")
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "file") as temporary:
        fail(temporary)
    assert (tmp_path / "file").read_text() == "a text"
    assert os.listdir(tmp_path) == ["file"]


def test_parts_of_runs_that_threads_finish_at_once(tmp_path: Path) -> None:
    runs, errors = Runs(tmp_path, {"model": "m"}), list[BaseException]()

    def save() -> None:
        try:
            for _ in range(20):
                runs.save("part", [{"a": 1}])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=save) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and runs.load("part") == [{"a": 1}]
