"""Prefixes on a disk that is full, broken or gone: nobody fails, and nothing half-written remains."""

import errno
import os
import resource
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from support.models import prompt
from support.saved_caches import two_layers
from test_prefixes import SPEC, filled, model_of, store_of
from xquant import PrefixStore
from xquant.saved.shelf import MOST, Shelf


def _raises(code: int) -> Callable[..., Any]:
    def fail(*args: Any, **options: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


@contextmanager
def full(folder: Path) -> Iterator[None]:
    """Half of a file finds room."""
    whole = Path.write_bytes

    def half(path: Path, data: bytes) -> int:
        whole(path, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "write_bytes", half)
        yield


@contextmanager
def no_room_for_folders(folder: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "mkdir", _raises(errno.ENOSPC))
        yield


@contextmanager
def too_large(folder: Path) -> Iterator[None]:
    """The system's own refusal, in the middle of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", _raises(errno.EROFS))
        yield


@contextmanager
def no_folder(folder: Path) -> Iterator[None]:
    """Something else has its name."""
    aside = folder.with_name("aside")
    folder.rename(aside)
    folder.touch()
    try:
        yield
    finally:
        folder.unlink()
        aside.rename(folder)


@pytest.mark.parametrize("failing", [full, no_room_for_folders, too_large, read_only, no_folder])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
def test_what_cannot_be_written_is_left_out(failing: Any, family: str, tmp_path: Path) -> None:
    model, folder = two_layers(family), tmp_path / "store"
    first, second = prompt(1, 300), torch.cat([prompt(1, 300), prompt(1, 200, seed=4)], 1)
    store = PrefixStore(folder, model, SPEC, "1GB")
    [there] = store.put(filled(model, SPEC, first), first)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    cache = filled(model, SPEC, second)
    with failing(folder), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            assert store.put(cache, second)[0] <= there
    written = [each.category for each in told if "cannot be written to (" in str(each.message)]
    assert written == [RuntimeWarning]
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    found = store.get(second)
    assert found is not None and found.get_seq_length() == there
    assert store.put(cache, second)[0] > there


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
def test_what_cannot_be_read_is_not_there(family: str, tmp_path: Path) -> None:
    model, folder, ids = two_layers(family), tmp_path / "store", prompt(1, 300)
    store = PrefixStore(folder, model, SPEC, "1GB")
    cache = filled(model, SPEC, ids)
    [there] = store.put(cache, ids)
    again = torch.cat([ids, ids[:, :1]], 1)
    for place, name in ((Path, "read_bytes"), (Path, "lstat"), (os, "scandir")):
        if name == "scandir" and family == "llama":
            continue  # its chunks are found by name
        store = PrefixStore(folder, model, SPEC, "1GB")
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            patch.setattr(place, name, _raises(errno.EIO))
            assert store.get(again) is None and store.get(again) is None
        assert len(told) == 1 and "cannot be read" in str(told[0].message)
    found = store.get(again)
    assert found is not None and found.get_seq_length() == there


def test_a_folder_that_cannot_be_written_to_is_read(tmp_path: Path) -> None:
    """When a file was used is not noted."""
    model, ids = model_of("llama"), prompt(1, 300)
    store = store_of(tmp_path, model, SPEC)
    store.put(filled(model, SPEC, ids), ids)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "utime", _raises(errno.EROFS))
        found = store.get(ids)
    assert found is not None and found.get_seq_length() == 256


def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    model, folder, ids = two_layers("gemma3"), tmp_path / "in" / "store", prompt(1, 300)
    store, cache = PrefixStore(folder, model, SPEC, "1GB"), filled(model, SPEC, ids)
    for _ in range(2):
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
        folder.parent.rmdir()
        assert store.get(ids) is None and store.nbytes == 0
        assert store.put(cache, ids) == [300] and store.nbytes > 0


def test_a_folder_that_cannot_be_used_is_told_when_it_is_opened(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "in"):
        with pytest.raises(OSError):
            Shelf(path, 1000)
    Shelf(tmp_path / "was-made", 1000)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(PermissionError):
        patch.setattr(os, "access", lambda *_: False)
        Shelf(tmp_path / "was-made", 1000)


def test_without_a_limit_the_disk_sets_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of what it has for the folder, however much of that is taken: whoever opens it has the same."""
    disk = 100_000

    def usage(folder: Path) -> Any:
        taken = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        return type("Usage", (), {"free": disk - taken})

    monkeypatch.setattr("shutil.disk_usage", usage)
    shelf = Shelf(tmp_path, None)
    assert shelf.limit == disk // 2
    names = [f"{number:02}" for number in range(20)]
    assert 0 < shelf.put(names, lambda _: {"part": torch.zeros(1000)}) < len(names)
    assert 40_000 < shelf.nbytes <= Shelf(tmp_path, None).limit == disk // 2
    disk = 10 * MOST
    assert Shelf(tmp_path, None).limit == MOST
